//! Text form of a compiled graph, the same on every machine: printed for readers, and hashed for digests.
//!
//! The text contains steps, shapes and sizes, but no weights: the checksum of the ONNX file identifies these.

use std::fmt::{self, Display, Formatter};
use std::sync::Arc;

use super::steps::{
    BufferRange, Factor, Int8Factor, KeyedFold, Memory, NormalizeWork, Operand, Plan, Precision, Step, Work,
};
use sterling_kernels::cpu::dense::{ChainLink, Form};

/// Cost of running a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Floating-point operations per request.
    pub user_flops: u64,
    /// Floating-point operations per row.
    pub row_flops: u64,
    /// Bytes of intermediate results per row, written and read once each.
    pub row_bytes: u64,
    /// Bytes of weights and other constants.
    pub constant_bytes: u64,
}

impl Figures {
    pub(super) fn of(plan: &Plan) -> Figures {
        let flops = |steps: &[Step]| steps.iter().map(|step| flops(&step.work)).sum();
        let bytes = |count: usize| count as u64 * size_of::<f32>() as u64;
        Figures {
            user_flops: flops(&plan.user),
            row_flops: flops(&plan.rows),
            row_bytes: 2 * bytes(plan.rows.iter().map(|step| numbers(&step.work)).sum()),
            constant_bytes: bytes(plan.constants.iter().map(|lines| lines.numbers().len()).sum())
                + int8_bytes(plan) as u64,
        }
    }
}

/// Returns the bytes of the quantized matrices, each counted once.
fn int8_bytes(plan: &Plan) -> usize {
    let mut seen = Vec::new();
    for step in plan.user.iter().chain(&plan.rows) {
        let Work::Int8Product { parts, .. } = &step.work else { continue };
        for Int8Factor { matrix, .. } in parts {
            if !seen.iter().any(|other| Arc::ptr_eq(other, matrix)) {
                seen.push(matrix.clone());
            }
        }
    }
    seen.iter().map(|matrix| matrix.bytes()).sum()
}

/// Returns the count of numbers that a step computes per row.
fn numbers(work: &Work) -> usize {
    match work {
        Work::Product { runs, columns, .. } | Work::Int8Product { runs, columns, .. } => runs * columns,
        Work::Matrices { left, shape: [m, _, n], .. } => left.len() * m * n,
        Work::Map1 { count, .. } => *count,
        Work::Map2 { outer, inner, .. } => outer * inner,
        Work::Fold { runs, .. } => *runs,
        Work::FoldEqual { folds, .. } => folds.len(),
        Work::Chain { kept, .. } => kept.len(),
        Work::Concat { runs, parts } => runs * parts.iter().map(|(_, count)| count).sum::<usize>(),
        Work::Pick { index, run, .. } => index.len() * run,
        Work::Spread { count, .. } => *count,
        Work::Softmax { runs, width, .. } => runs * width,
        Work::Normalize(work) => work.runs * work.width,
        Work::Attention(work) => work.numbers(),
        Work::Recurrent(work) => work.numbers(),
        Work::Narrow { count, .. } => Form::Pairs.room(*count),
        Work::PackNarrow { depth, columns, .. } => Form::Pairs.room(*depth) * columns,
    }
}

fn flops(work: &Work) -> u64 {
    let flops = match work {
        Work::Product { parts, .. } => 2 * numbers(work) * parts.iter().map(|part| part.depth).sum::<usize>(),
        Work::Int8Product { parts, .. } => {
            2 * numbers(work) * parts.iter().map(|part| part.matrix.depth()).sum::<usize>()
        }
        Work::Matrices { shape: [_, k, _], .. } => 2 * numbers(work) * k,
        Work::Map1 { .. } | Work::Map2 { .. } => numbers(work),
        Work::Fold { runs, count, .. } => runs * count,
        Work::FoldEqual { count, folds, .. } => count * (1 + 2 * folds.len()),
        Work::Chain { links, .. } => links.len(),
        Work::Spread { index, run, .. } => index.len() * run,
        Work::Softmax { runs, width, .. } => 5 * runs * width,
        Work::Normalize(work) => work.passes() * work.runs * work.width,
        Work::Attention(work) => 2 * work.work()[0] + work.work()[1],
        Work::Recurrent(work) => 2 * work.cost(),
        Work::Concat { .. } | Work::Pick { .. } | Work::Narrow { .. } | Work::PackNarrow { .. } => 0,
    };
    flops as u64
}

/// Describes two plans; those of bf16 as compiled in f32. Published versions record a digest of this text
/// (`RowProgram::digest`), so a change of its wording would be reported as a change of every graph.
pub(super) fn describe(straight: &Plan, collapsed: &Plan, precision: Precision) -> String {
    let [straight, collapsed] = [straight, collapsed].map(|plan| Text(plan).to_string());
    let precision = match precision {
        Precision::F32 => "",
        Precision::Bf16 => "wide products in bf16, where the processor has them\n",
        Precision::Int8 => "products marked int8 in int8, on GPUs in f32\n",
    };
    match straight == collapsed {
        true => format!("{precision}for any number of rows\n{straight}"),
        false => format!("{precision}for few rows\n{straight}for many rows\n{collapsed}"),
    }
}

struct Text<'a>(&'a Plan);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = self.0;
        let Figures { user_flops, row_flops, row_bytes, constant_bytes } = Figures::of(plan);
        writeln!(f, "  {constant_bytes} bytes of constants")?;
        for (part, flops, steps) in [("a request", user_flops, &plan.user), ("a row", row_flops, &plan.rows)] {
            write!(f, "  {part}: {} steps, {flops} FLOP", steps.len())?;
            if part == "a row" {
                write!(f, ", {row_bytes} bytes of intermediate results")?;
            }
            writeln!(f)?;
            for step in steps {
                let out = if part == "a row" { Memory::Rows(step.out) } else { Memory::User(step.out) };
                writeln!(f, "    {} = {}", name(plan, out), step.work)?;
            }
        }
        plan.outputs.iter().try_for_each(|place| writeln!(f, "  output {place}"))
    }
}

/// Returns the name of a written buffer, with its width.
fn name(plan: &Plan, memory: Memory) -> String {
    let width = match memory {
        Memory::User(n) => plan.user_counts[n],
        Memory::Rows(n) => plan.strides[n],
        Memory::Constant(_) | Memory::Given => 0,
    };
    format!("{}[{width}]", BufferRange { memory, offset: 0 })
}

impl Display for BufferRange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.memory {
            Memory::Constant(n) => write!(f, "c{n}")?,
            Memory::User(n) => write!(f, "u{n}")?,
            Memory::Rows(n) => write!(f, "r{n}")?,
            Memory::Given => write!(f, "in")?,
        }
        match self.offset {
            0 => Ok(()),
            offset => write!(f, "+{offset}"),
        }
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}({},{})", self.place, self.outer, self.inner)
    }
}

impl Display for Work {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Work::Product { parts, bias, runs, columns, relu, .. } => {
                write!(f, "product")?;
                for (n, Factor { rows, depth, matrix, .. }) in parts.iter().enumerate() {
                    let plus = if n == 0 { "" } else { " +" };
                    write!(f, "{plus} {rows}[{runs}, {depth}] x {matrix}[{depth}, {columns}]")?;
                }
                if let Some(bias) = bias {
                    write!(f, " + {bias}[{columns}]")?;
                }
                if *relu { write!(f, ", relu") } else { Ok(()) }
            }
            Work::Int8Product { parts, bias, runs, columns, map } => {
                write!(f, "int8 product")?;
                for (n, Int8Factor { rows, matrix }) in parts.iter().enumerate() {
                    let (plus, depth) = (if n == 0 { "" } else { " +" }, matrix.depth());
                    write!(f, "{plus} {rows}[{runs}, {depth}] x [{depth}, {columns}]")?;
                }
                if let Some(bias) = bias {
                    write!(f, " + {bias}[{columns}]")?;
                }
                map.map_or(Ok(()), |map| write!(f, ", {}", lower(&map)))
            }
            Work::Matrices { a, b, left, shape: [m, k, n], .. } => {
                write!(f, "matrices {} of {a}[{m}, {k}] x {b}[{k}, {n}]", left.len())
            }
            Work::Map1 { f: map, a, count } => write!(f, "{} {a}[{count}]", lower(map)),
            Work::Map2 { f: map, a, b, outer, inner } => write!(f, "{} {a}, {b} [{outer}, {inner}]", lower(map)),
            Work::Fold { f: fold, a, runs, count } => write!(f, "fold by {} {a}[{runs}, {count}]", lower(fold)),
            Work::FoldEqual { key, keys, count, folds } => {
                write!(f, "where {keys}[{count}] is {key}, fold")?;
                for (n, KeyedFold { f: fold, values }) in folds.iter().enumerate() {
                    write!(f, "{} by {} {values}", if n == 0 { "" } else { "," }, lower(fold))?;
                }
                Ok(())
            }
            Work::Chain { reads, links, kept } => {
                let register = |&n: &usize| match reads.get(n) {
                    Some(place) => place.to_string(),
                    None => format!("t{}", n - reads.len()),
                };
                write!(f, "chain")?;
                for (n, link) in links.iter().enumerate() {
                    match link {
                        ChainLink::One(map, a) => write!(f, " t{n} = {} {};", lower(map), register(a))?,
                        ChainLink::Two(map, [a, b]) => {
                            write!(f, " t{n} = {} {}, {};", lower(map), register(a), register(b))?
                        }
                    }
                }
                write!(f, " keep {}", kept.iter().map(register).collect::<Vec<_>>().join(" "))
            }
            Work::Softmax { a, runs, width } => write!(f, "softmax {a}[{runs}, {width}]"),
            Work::Normalize(work) => write!(f, "{work}"),
            Work::Attention(work) => write!(f, "{work}"),
            Work::Recurrent(work) => write!(f, "{work}"),
            Work::Concat { runs, parts } => {
                write!(f, "concat {runs} of")?;
                parts.iter().try_for_each(|(part, count)| write!(f, " {part}[{count}]"))
            }
            Work::Narrow { a, count, first } => write!(f, "pairs from {first} on of {a}[{count}]"),
            Work::PackNarrow { a, depth, columns, rows } => {
                write!(f, "pairs from {} of {} on of {a}[{depth}, {columns}]", rows.first, rows.all)
            }
            Work::Pick { a, index, run, .. } => {
                write!(f, "pick {a}[{}, {run}] in the order {:016x}", index.len(), order(index))
            }
            Work::Spread { a, index, run, .. } => {
                write!(f, "spread {a}[{}, {run}] in the order {:016x}", index.len(), order(index))
            }
        }
    }
}

impl Display for NormalizeWork {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let NormalizeWork { a, runs, width, centre, scale, bias, relu, .. } = self;
        write!(f, "normalize {a}[{runs}, {width}] by {} means", centre.len())?;
        scale.map_or(Ok(()), |scale| write!(f, ", x {scale}"))?;
        bias.map_or(Ok(()), |bias| write!(f, ", + {bias}"))?;
        if *relu { write!(f, ", relu") } else { Ok(()) }
    }
}

/// Returns a hash of a list of indices.
fn order(index: &[u32]) -> u64 {
    let bytes: Vec<u8> = index.iter().flat_map(|n| n.to_le_bytes()).collect();
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

pub(super) fn lower(operation: &impl fmt::Debug) -> String {
    format!("{operation:?}").to_lowercase()
}
