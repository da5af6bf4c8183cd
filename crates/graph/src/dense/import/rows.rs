//! Row numbers (`torch.arange(batch)`), which may only select the row's own numbers.
//!
//! A graph is compiled for one row, so `x[arange(batch), index]` selects by `index` within the row. Exporters write
//! this as `GatherND`, or as `Gather` from an axis into which rows and the next axis are merged.

use rten_onnx::onnx::{DataType, NodeProto};

use super::known::{Attributes, Extent, Importer, Known, RowNumbers, place, refused};
use crate::dense::ir::broadcast;
use sterling_core::error::Result;

impl Importer {
    /// Returns the result of a node on row numbers; `None` if the node has no row numbers, or does not compute with
    /// them.
    pub(super) fn row_numbers(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Option<Known>> {
        if operator == "Range" {
            let one = |n: usize| match self.known(node, n) {
                Ok(Known::Integers(integers)) if integers.extents.len() == 1 => Some(integers.extents[0]),
                _ => None,
            };
            let is_row = [one(0), one(1), one(2)] == [Extent::Fixed(0), Extent::Rows(1), Extent::Fixed(1)].map(Some);
            let numbers = RowNumbers { times: 1, plus: None, shape: vec![1], rows: 0 };
            return Ok(is_row.then_some(Known::RowNumbers(numbers)));
        }
        let place_of = |n: &usize| match self.known(node, *n) {
            Ok(Known::RowNumbers(numbers)) => Some((*n, numbers.clone())),
            _ => None,
        };
        let Some((at, mut numbers)) = (0..node.input.len()).find_map(|n| place_of(&n)) else { return Ok(None) };
        let no = || refused("row numbers are only supported as indices of the same row");
        match operator {
            // These operators select numbers by the row number, or read a shape.
            "Gather" | "GatherND" | "Shape" => return Ok(None),
            "Identity" => {}
            "Cast" => {
                let to = DataType(i32::try_from(attributes.integer("to", 0)).unwrap_or(0));
                if to != DataType::INT64 && to != DataType::INT32 {
                    return Err(no());
                }
            }
            "Unsqueeze" => {
                let axes =
                    self.axes(node, attributes, 1)?.ok_or_else(|| refused("attribute or input `axes` is missing"))?;
                let rank = numbers.shape.len() + axes.len();
                let mut new = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>>>()?;
                new.sort_unstable();
                for axis in new {
                    numbers.rows += usize::from(axis <= numbers.rows);
                    numbers.shape.insert(axis.min(numbers.shape.len()), 1);
                }
            }
            "Reshape" => {
                attributes.integer("allowzero", 0);
                let sizes = self.vector(node, 1)?;
                let is_open = |size: &Extent| matches!(size, Extent::Fixed(-1) | Extent::Rows(1));
                let is_one = |size: &Extent| is_open(size) || *size == Extent::Fixed(1);
                if numbers.shape.iter().any(|&d| d != 1) || !sizes.iter().all(is_one) {
                    return Err(no());
                }
                numbers.rows = sizes.iter().position(is_open).ok_or_else(no)?;
                numbers.shape = vec![1; sizes.len()];
            }
            "Expand" => {
                let size = |size: &Extent| match size {
                    Extent::Fixed(n) | Extent::Rows(n) => usize::try_from(*n).map_err(|_| no()),
                };
                let extents = self.vector(node, 1)?;
                let sizes = extents.iter().map(size).collect::<Result<Vec<_>>>()?;
                let shape = broadcast(&numbers.shape, &sizes)?;
                numbers.rows += shape.len() - numbers.shape.len();
                // A row number is an index within its own row only: rows along another axis would combine each row
                // number with all rows.
                let ahead = shape.len() - sizes.len();
                let is_other =
                    |(n, size): (usize, &Extent)| matches!(size, Extent::Rows(_)) && n + ahead != numbers.rows;
                if shape[numbers.rows] != 1 || extents.iter().enumerate().any(is_other) {
                    return Err(no());
                }
                numbers.shape = shape;
            }
            "Mul" if numbers.plus.is_none() => match self.known(node, 1 - at)? {
                Known::Integers(by) if matches!(by.extents[..], [Extent::Fixed(1..)]) && by.shape.len() <= 1 => {
                    let by = self.fixed(node, 1 - at)?[0];
                    numbers.times = numbers.times.checked_mul(by).ok_or_else(no)?;
                }
                _ => return Err(no()),
            },
            "Add" if numbers.plus.is_none() => {
                let plus = self.number(node, 1 - at)?;
                let shape = broadcast(&numbers.shape, self.graph.shape(plus))?;
                numbers.rows += shape.len() - numbers.shape.len();
                if self.graph.shape(plus) != &shape[..] || self.rows(plus).is_some_and(|r| r != numbers.rows) {
                    return Err(no());
                }
                (numbers.plus, numbers.shape) = (Some(plus), shape);
            }
            // Exporters broadcast two indices with these operators, and only read the shape of the result.
            "Max" | "Min" if node.input.len() == 2 => {
                let other = self.shape_of_known(self.known(node, 1 - at)?);
                let shape = broadcast(&numbers.shape, &other)?;
                numbers.rows += shape.len() - numbers.shape.len();
                if shape[numbers.rows] != 1 {
                    return Err(no());
                }
                (numbers.times, numbers.plus, numbers.shape) = (0, None, shape);
            }
            "Concat" => {
                let axis = place(attributes.integer("axis", 0), numbers.shape.len())?;
                let all = (0..node.input.len()).map(|n| self.known(node, n).cloned()).collect::<Result<Vec<_>>>()?;
                let is_column = |known: &Known| self.shape_of_known(known).last() == Some(&1);
                if axis + 1 != numbers.shape.len() || at != 0 || !all.iter().all(is_column) {
                    return Err(no());
                }
                return Ok(Some(Known::Columns(all)));
            }
            _ => return Err(no()),
        }
        Ok(Some(Known::RowNumbers(numbers)))
    }

    fn shape_of_known(&self, known: &Known) -> Vec<usize> {
        match known {
            Known::Value(id) => self.graph.shape(*id).to_vec(),
            Known::Integers(integers) => integers.shape.clone(),
            Known::RowNumbers(numbers) => numbers.shape.clone(),
            Known::Columns(_) => Vec::new(),
        }
    }
}
