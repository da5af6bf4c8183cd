//! Locates the first node whose result differs from the reference evaluation of its file.

use rten_onnx::onnx::{ModelProto, ValueInfoProto};

use super::compare::{self, Difference, Expected};
use super::oracle::{Arithmetic, Array, Mode, Oracle, shown};
use sterling_graph::dense::{self, DeclaredInput, DeclaredOutput, InputRows, RowProgram, Size};
use sterling_graph::tower::{Graph, Input, Threads};

/// Maximum size of a graph file in which the node is searched, in bytes.
const BYTES_MAX: usize = 1 << 30;
/// Maximum work of all evaluations of the search, in multiply-adds.
const WORK_MAX: u64 = 1 << 30;

/// A graph, and a row for which its output differs from the reference.
pub(super) struct Differing<'a> {
    /// Bytes of the ONNX file.
    pub(super) bytes: &'a [u8],
    pub(super) oracle: &'a Oracle,
    /// Inputs of the row; user inputs first.
    pub(super) one: &'a [(String, Array)],
    /// Inputs of the same row twice, which reveals the row axes.
    pub(super) two: &'a [(String, Array)],
    /// Number of user inputs, which all rows share.
    pub(super) of_user: usize,
    pub(super) is_program: bool,
    pub(super) threads: &'a Threads,
}

impl Differing<'_> {
    /// Returns the first node whose output differs, with one differing number; `None` if the search is too expensive or every node
    /// is correct when it runs alone.
    pub(super) fn first(&self) -> Option<(String, Difference)> {
        let made = self.made(self.one)?;
        let doubled = self.made(self.two)?;
        let work = compare::work_of(self.oracle, self.one, &[], compare::WORK).ok()?.saturating_mul(made.len() as u64);
        if self.bytes.len().saturating_mul(made.len()) > BYTES_MAX || work > WORK_MAX {
            return None;
        }
        made.iter().zip(&doubled).find_map(|((node, name, shape), (.., twice))| {
            let width = shape.iter().product();
            let expected = Expected::of(self.oracle, self.one, &[(name, width)], 1).ok()?.remove(0);
            let size = |(&d, &twice): (&usize, &usize)| if d == twice { Size::Fixed(d as i64) } else { Size::Rows };
            let shape = shape.iter().zip(twice).map(size).collect();
            let got = if self.is_program { self.program(name, shape) } else { self.runtime(name) }?;
            let difference = compare::difference(&got, expected.row(0), &expected.tolerances(0, 0.0, false))?;
            Some((node.clone(), difference))
        })
    }

    /// Returns the nodes that produce floats, with the name and shape of each output.
    fn made(&self, inputs: &[(String, Array)]) -> Option<Vec<(String, String, Vec<usize>)>> {
        let mut all = Vec::new();
        let mut seen = |node: &_, name: &str, array: &Array| {
            if array.reals().is_ok() {
                all.push((shown(node), name.to_owned(), array.shape.clone()));
            }
        };
        self.oracle.run(inputs, &[], &mut Arithmetic::new(Mode::Exact, WORK_MAX), &mut seen).ok()?;
        Some(all)
    }

    fn program(&self, name: &str, shape: Vec<Size>) -> Option<Vec<f32>> {
        let given = |n: usize| {
            let ((name, one), (_, two)) = (&self.one[n], &self.two[n]);
            let size = |(&d, &twice): (&usize, &usize)| if d == twice { Size::Fixed(d as i64) } else { Size::Rows };
            let shape = one.shape.iter().zip(&two.shape).map(size).collect();
            DeclaredInput { name: name.clone(), is_pair: n >= self.of_user, shape }
        };
        let given: Vec<DeclaredInput> = (0..self.one.len().min(self.two.len())).map(given).collect();
        let program = RowProgram::lower(self.bytes, &given, &[DeclaredOutput { name: name.into(), shape }]).ok()?;
        let all: Vec<Vec<f32>> = self.one.iter().map(|(_, array)| singles(array)).collect::<Option<_>>()?;
        let user: Vec<&[f32]> = all[..self.of_user].iter().map(Vec::as_slice).collect();
        let row = all[self.of_user..].concat();
        let mut fill = |given: InputRows<'_>| given.each(|_, numbers| numbers.copy_from_slice(&row));
        let mut made = None;
        let ran = program.run(1, &user, &mut dense::Scratch::default(), &mut fill, &mut |_, _, block| {
            made = Some(block.output(0).row(0).to_vec());
            Ok(())
        });
        ran.ok().and(made)
    }

    fn runtime(&self, name: &str) -> Option<Vec<f32>> {
        let mut model = ModelProto::parse_buf(self.bytes).ok()?;
        let output = ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() };
        model.graph.as_mut()?.output = vec![output];
        let graph = Graph::load("", model.write_buf().ok()?).ok()?;
        let all: Vec<Vec<f32>> = self.one.iter().map(|(_, array)| singles(array)).collect::<Option<_>>()?;
        let inputs: Vec<Input<'_>> = self
            .one
            .iter()
            .zip(&all)
            .map(|((name, array), values)| Input { name, shape: &array.shape, values })
            .collect();
        graph.run(&inputs, name, self.threads).ok().map(sterling_core::tensor::Tensor::into_data)
    }
}

fn singles(array: &Array) -> Option<Vec<f32>> {
    array.reals().ok().map(|numbers| numbers.iter().map(|&x| x as f32).collect())
}
