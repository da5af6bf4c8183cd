//! Item columns of a snapshot: filters and value models read them, and answers return them.
//!
//! Columns arrive in the order of the item file ([`ItemColumn`]), are encoded in slot order ([`encode`]) and are read from the
//! mapped file ([`Columns`]). A category column is dictionary-encoded: its distinct values are sorted, the rank of a value is its
//! *code*, and the codes per slot are compressed sparse rows. Because dictionaries are sorted, a comparison on integers is a
//! range of codes. Every (filterable category, code) pair is one [`sterling_core::units::TermId`], dense within the snapshot.
//!
//! | tensor (`c3` = column 3) | holds |
//! |---|---|
//! | `columns` u8 | JSON list of names, kinds, whether filterable |
//! | `c3.integers` i64 `[V]`, or `c3.text_offsets` u64 `[V+1]` and `c3.text_bytes` u8 | the dictionary, ascending |
//! | `c3.offsets` u32 `[S+1]`, `c3.codes` u32 | codes of each slot, ascending |
//! | `c3.floats` f64 `[S]` | numbers, NaN if missing |

mod build;
mod cell;
mod comparison;
mod containing;
#[cfg(feature = "cuda")]
mod device;
mod likeness;
mod operator;
mod overlay;
mod sparse;
mod stacked;
mod view;

pub use build::{ItemColumn, ItemValues, encode, text_bytes, values_end};
pub use cell::Cell;
pub use comparison::Comparison;
pub(crate) use comparison::evaluate_bits;
pub use containing::Contains;
#[cfg(feature = "cuda")]
pub use device::DeviceColumns;
pub use likeness::likeness;
pub use operator::{Operator, Threshold};
pub use overlay::{Overlay, Predicate, Value};
pub(crate) use sparse::bits;
pub use stacked::Stacked;
pub use view::{Column, ColumnKind, Columns};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::units::{NO_ITEM, Slot, TermId};
    use sterling_storage::files::{TensorFile, Tensors};

    pub(super) fn opened(columns: &[ItemColumn], order: &[u32]) -> Columns {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("columns.safetensors");
        let mut file = TensorFile::new();
        encode(columns, order, &mut file).unwrap();
        file.write(&path).unwrap();
        Columns::open(&Tensors::open(&path).unwrap(), order.len()).unwrap()
    }

    fn sample() -> Columns {
        let texts = |rows: &[&[&str]]| ItemValues::Texts {
            offsets: rows
                .iter()
                .scan(0, |n, r| {
                    *n += r.len() as u32;
                    Some(*n)
                })
                .fold(vec![0], |mut v, n| {
                    v.push(n);
                    v
                }),
            values: rows.iter().flat_map(|r| r.iter().map(|s| s.to_string())).collect(),
        };
        let columns = [
            ItemColumn { name: "lang".into(), filter: true, values: texts(&[&["fr", "en", "fr"], &[], &["de"]]) },
            ItemColumn { name: "note".into(), filter: false, values: texts(&[&["a"], &["b"], &["c"]]) },
            ItemColumn {
                name: "year".into(),
                filter: true,
                values: ItemValues::Integers { offsets: vec![0, 1, 3, 3], values: vec![2024, 7, -3] },
            },
            ItemColumn { name: "price".into(), filter: true, values: ItemValues::Floats(vec![9.5, f64::NAN, -1.0]) },
        ];
        opened(&columns, &[2, NO_ITEM, 0, 1])
    }

    #[test]
    fn columns_come_back_in_slot_order() {
        let columns = sample();
        assert_eq!(columns.list().map(|c| c.name()).collect::<Vec<_>>(), ["lang", "note", "year", "price"]);
        assert_eq!(columns.terms(), 3 + 3, "note is not filterable and price is a number");
        let lang = columns.column("lang").unwrap();
        assert_eq!(columns.column("0").unwrap().name(), "lang", "a column is known by its number too");
        assert_eq!(lang.cell(Slot(2)), Cell::Texts(vec!["en", "fr"]), "values are a set, sorted");
        assert_eq!(lang.cell(Slot(0)), Cell::Text("de"));
        assert_eq!((lang.cell(Slot(1)), lang.cell(Slot(3))), (Cell::Missing, Cell::Missing));
        let year = columns.column("year").unwrap();
        assert_eq!(year.cell(Slot(3)), Cell::Integers(vec![-3, 7]));
        assert_eq!(columns.column("price").unwrap().cell(Slot(2)), Cell::Float(9.5));
        assert_eq!(columns.column("price").unwrap().numbers().unwrap(), [-1.0, 0.0, 9.5, 0.0]);
        assert_eq!(year.numbers().unwrap(), [0.0, 0.0, 2024.0, -3.0]);
    }

    #[test]
    fn terms_resolve_and_unknown_ones_match_nothing() {
        let columns = sample();
        let (lang, year) = (columns.column("lang").unwrap(), columns.column("year").unwrap());
        assert_eq!(lang.term("de").unwrap(), Some(TermId(0)));
        assert_eq!(lang.term("zz").unwrap(), None);
        assert_eq!(year.term("2024").unwrap(), Some(TermId(5)));
        assert!(year.term("two").unwrap_err().to_string().contains("expected an integer"));
        assert!(columns.column("price").unwrap().term("9.5").unwrap_err().to_string().contains("compare it"));
        assert!(columns.column("note").unwrap().term("a").unwrap_err().to_string().contains("not filterable"));
        let error = columns.column("colour").unwrap_err().to_string();
        assert!(error.contains("`colour`") && error.contains("lang, note, year, price"), "{error}");
        assert_eq!(lang.codes(Slot(2)), [1, 2]);
    }

    #[test]
    fn comparisons_match_if_any_value_matches() {
        let columns = sample();
        let holds = |name: &str, op, number: &str| {
            let column = columns.column(name).unwrap();
            let test = column.comparison(op, number).unwrap();
            (0..4).filter(|&s| column.compares(&test, Slot(s))).collect::<Vec<_>>()
        };
        use Operator::*;
        assert_eq!(holds("year", Less, "7"), [3]);
        assert_eq!(holds("year", LessEqual, "7.5"), [3]);
        assert_eq!(holds("year", GreaterEqual, "7"), [2, 3]);
        assert_eq!(holds("year", Equal, "7.5"), [0u32; 0]);
        assert_eq!(holds("year", NotEqual, "2024"), [3]);
        assert_eq!(holds("year", Less, "2024.0"), [3], "a whole number may be written with a fraction");
        assert_eq!((holds("year", Equal, "2.024e3"), holds("year", GreaterEqual, "7.0")), (vec![2], vec![2, 3]));
        assert_eq!(holds("year", Greater, "-99999999999999999999"), [2, 3], "numbers beyond 64 bits compare too");
        assert_eq!(holds("year", Less, "-1e300"), [0u32; 0]);
        assert_eq!(holds("price", Greater, "-1"), [2]);
        assert_eq!(holds("price", NotEqual, "-1"), [2], "a missing number compares to nothing");
        assert!(columns.column("lang").unwrap().comparison(Less, "1").is_err());
        assert!(columns.column("year").unwrap().comparison(Less, "x").is_err());
    }

    #[test]
    fn predicates_treat_updated_values_like_column_values() {
        let columns = sample();
        let attribute = |column: &Column, slot| match column.cell(slot) {
            Cell::Missing => Value::Missing,
            Cell::Integer(value) => Value::of_integers(&[value]),
            Cell::Integers(values) => Value::of_integers(&values.into_iter().rev().collect::<Vec<_>>()),
            Cell::Float(value) => Value::Float(value),
            Cell::Text(text) => Value::of_texts(&[text.to_owned()]),
            Cell::Texts(texts) => Value::of_texts(&texts.into_iter().rev().map(str::to_owned).collect::<Vec<_>>()),
        };
        use Operator::*;
        for (column, slot) in columns.list().flat_map(|column| (0..4).map(move |slot| (column, Slot(slot)))) {
            let value = attribute(column, slot);
            assert_eq!(value.cell(), column.cell(slot));
            let numbers = column.numbers().map(|numbers| numbers[slot.index()]);
            assert_eq!(numbers.unwrap_or(0.0), value.number());
            for (operator, text) in
                [Less, LessEqual, Greater, GreaterEqual, Equal, NotEqual].into_iter().flat_map(|operator| {
                    [
                        "-3",
                        "6.5",
                        "7",
                        "7.0",
                        "7.5",
                        "2024",
                        "2.024e3",
                        "-1",
                        "9.5",
                        "1e300",
                        "-1e300",
                        "99999999999999999999",
                    ]
                    .map(|text| (operator, text))
                })
            {
                let Ok(comparison) = column.comparison(operator, text) else { continue };
                let requested = column.comparison_test(operator, text).unwrap();
                assert_eq!(
                    requested.holds(&value),
                    column.compares(&comparison, slot),
                    "{} {operator:?} {text} {value:?}",
                    column.name()
                );
            }
            for wanted in [&["fr"][..], &["zz", "de"], &["7"], &["1", "2024"]]
                .map(|all| all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>())
            {
                let terms: Vec<_> = wanted.iter().map(|one| column.term(one)).collect();
                if terms.iter().any(|term| term.is_err()) {
                    continue;
                }
                let holds = terms
                    .into_iter()
                    .flatten()
                    .flatten()
                    .any(|term| column.codes(slot).contains(&column.code(term).unwrap()));
                assert_eq!(
                    column.term_test(&wanted).unwrap().holds(&value),
                    holds,
                    "{} {wanted:?} {value:?}",
                    column.name()
                );
            }
        }
        assert_eq!(Value::of_integers(&[4, 4]), Value::Integer(4));
        assert_eq!(Value::of_texts(&["a".to_owned(), "a".to_owned()]), Value::Text("a".into()));
        assert_eq!((Value::of_integers(&[]), Value::of_texts(&[])), (Value::Missing, Value::Missing));
    }

    #[test]
    fn malformed_tensors_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.safetensors");
        let head = br#"[{"name":"a","kind":"integers","filter":true}]"#;
        for (dictionary, offsets, codes) in [
            (vec![5i64, 4], vec![0u32, 1, 1], vec![0u32]),
            (vec![4, 5], vec![0, 2, 1], vec![0]),
            (vec![4, 5], vec![0, 1, 9], vec![0]),
            (vec![4, 5], vec![0, 1, 1], vec![7]),
            (vec![4, 5], vec![0, 2, 2], vec![1, 1]),
            (vec![4, 5], vec![0, 1], vec![1]),
        ] {
            let mut file = TensorFile::new();
            file.add("columns", &[head.len()], head.as_slice()).unwrap();
            file.add("c0.integers", &[dictionary.len()], &dictionary).unwrap();
            file.add("c0.offsets", &[offsets.len()], &offsets).unwrap();
            file.add("c0.codes", &[codes.len()], &codes).unwrap();
            file.write(&path).unwrap();
            assert!(Columns::open(&Tensors::open(&path).unwrap(), 2).is_err(), "{dictionary:?} {offsets:?} {codes:?}");
        }
    }
}
