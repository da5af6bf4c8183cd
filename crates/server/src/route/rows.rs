//! Protocol by which servers request table rows from each other: one call per host for all tables of a version, encoded like
//! calls of routers.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /v1/models/{model}:rows` | [`RowsCall`] | [`RowsReply`], or a problem as in other calls |

use serde::{Deserialize, Serialize};

use super::protocol::read;
use sterling_core::error::{Error, Result};
use sterling_core::packed;
use sterling_embedding::tiers::slices::{SliceName, Slices};

/// Maximum number of queries per call.
pub const QUESTIONS_MAX: usize = 1024;
/// Maximum size of the rows that a call requests, in bytes; a single row may be larger.
pub const ROWS_BYTES_MAX: usize = 4 << 20;

/// Request of a server for table rows of another host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowsCall {
    /// One query per slice.
    pub questions: Vec<RowsQuestion>,
}

/// Requested rows of one slice. An empty list checks whether the slice is held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowsQuestion {
    /// Name of the table.
    pub table: String,
    /// Checksum of the file that holds the table.
    pub content: String,
    /// Row range of the slice.
    pub slice_rows: [u64; 2],
    /// Column range of the slice.
    pub slice_columns: [u32; 2],
    /// Rows, relative to the slice's first.
    #[serde(with = "packed::numbers")]
    pub rows: Vec<u64>,
}

/// Answer to a [`RowsCall`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowsReply {
    /// One answer per query; `None` if the slice is not held.
    pub given: Vec<Option<SliceRows>>,
}

/// Rows of a slice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SliceRows {
    /// Checksum of the file that the rows come from.
    pub content: String,
    /// Bytes of the requested rows, one after the other.
    #[serde(with = "packed::numbers")]
    pub bytes: Vec<u8>,
}

impl RowsQuestion {
    /// Creates a query for rows of a slice.
    pub fn of(name: &SliceName, rows: Vec<u64>) -> Self {
        let SliceName { table, content, rows: slice_rows, columns: slice_columns, .. } = name.clone();
        RowsQuestion { table, content, slice_rows, slice_columns, rows }
    }

    fn name(&self, model: &str) -> SliceName {
        let (table, content) = (self.table.clone(), self.content.clone());
        SliceName { model: model.to_owned(), table, content, rows: self.slice_rows, columns: self.slice_columns }
    }
}

/// Decodes a call.
///
/// # Errors
/// `Invalid` with the problem.
pub fn read_rows_call(body: &[u8]) -> Result<RowsCall> {
    let call: RowsCall = read(body)?;
    match call.questions.len() <= QUESTIONS_MAX {
        true => Ok(call),
        false => {
            let count = call.questions.len();
            Err(Error::invalid(format!("field `questions`: got {count}, expected at most {QUESTIONS_MAX}")))
        }
    }
}

/// Returns the bytes of the rows that a call requests from held slices.
pub fn rows_bytes(model: &str, call: &RowsCall, slices: &Slices) -> usize {
    let bytes = |question: &RowsQuestion| {
        let slice = slices.get(&question.name(model));
        slice.map_or(0, |slice| slice.row_bytes().saturating_mul(question.rows.len()))
    };
    call.questions.iter().map(bytes).fold(0, usize::saturating_add)
}

/// Answers a call from held slices.
///
/// # Errors
/// `Invalid` with the slice and the row that it does not have.
pub fn answer_rows(model: &str, call: &RowsCall, slices: &Slices) -> Result<RowsReply> {
    let given = |question: &RowsQuestion| {
        let name = question.name(model);
        let Some(slice) = slices.get(&name) else { return Ok(None) };
        let mut bytes = Vec::new();
        slice.copy(&question.rows, &mut bytes).map_err(|e| e.within(&name))?;
        Ok(Some(SliceRows { content: name.content, bytes }))
    };
    Ok(RowsReply { given: call.questions.iter().map(given).collect::<Result<_>>()? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::protocol::write;
    use super::*;
    use sterling_core::error::Kind;
    use sterling_kernels::buffer::Buffer;

    fn name() -> SliceName {
        SliceName { model: "m".into(), table: "t".into(), content: "c0".into(), rows: [10, 14], columns: [0, 8] }
    }

    fn call(rows: Vec<u64>) -> RowsCall {
        let other = SliceName { table: "u".into(), ..name() };
        RowsCall { questions: vec![RowsQuestion::of(&name(), rows), RowsQuestion::of(&other, vec![1])] }
    }

    #[test]
    fn rows_are_returned_for_their_exact_name_only() {
        let slices = Slices::default();
        let held = slices.hold(name(), Buffer::copied(&[0u8, 0, 1, 1, 2, 2, 3, 3]).unwrap()).unwrap();
        let requested = read_rows_call(&write(&call(vec![3, 0, 3])).unwrap()).unwrap();
        assert_eq!(rows_bytes("m", &requested, &slices), 6);
        let reply: RowsReply = read(&write(&answer_rows("m", &requested, &slices).unwrap()).unwrap()).unwrap();
        let given = SliceRows { content: "c0".into(), bytes: vec![3, 3, 0, 0, 3, 3] };
        assert_eq!(reply.given, [Some(given), None]);
        assert_eq!(answer_rows("n", &requested, &slices).unwrap().given, [None, None], "of another model");
        let error = answer_rows("m", &call(vec![4]), &slices).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains("m/t-c0"), "{error}");
        assert!(answer_rows("m", &call(vec![u64::MAX]), &slices).is_err());
        drop(held);
        assert_eq!(answer_rows("m", &requested, &slices).unwrap().given, [None, None], "released");
        let many = RowsCall { questions: vec![RowsQuestion::of(&name(), vec![]); QUESTIONS_MAX + 1] };
        assert!(read_rows_call(&write(&many).unwrap()).unwrap_err().to_string().contains("`questions`: got 1025"));
    }

    proptest! {
        #[test]
        fn broken_bodies_are_rejected(at in 0usize..200, byte in any::<u8>(), cut in any::<bool>()) {
            let slices = Slices::default();
            let _held = slices.hold(name(), Buffer::copied(&[7u8; 8]).unwrap()).unwrap();
            let mut body = write(&call(vec![0, 1, 2])).unwrap();
            let at = at % body.len();
            match cut {
                true => body.truncate(at),
                false => body[at] = byte,
            }
            // Some mutated bodies still are calls; none may cause a panic, or an answer larger than requested.
            if let Ok(call) = read_rows_call(&body) {
                let bytes = rows_bytes("m", &call, &slices);
                prop_assert!(bytes <= body.len());
                let _ = answer_rows("m", &call, &slices);
            }
            let _ = read::<RowsReply>(&body);
        }
    }
}
