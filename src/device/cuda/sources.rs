//! The kernels' texts, as NVRTC compiles them.

/// A file of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! source {
    ($name:literal) => {
        Source { name: $name, text: include_str!(concat!("kernels/", $name)) }
    };
}

/// Files that are compiled, each by itself.
pub const KERNELS: [Source; 7] = [
    source!("scan.cu"),
    source!("topk.cu"),
    source!("pool.cu"),
    source!("filter.cu"),
    source!("rows.cu"),
    source!("dense.cu"),
    source!("value.cu"),
];

/// Files that these include.
pub const HEADERS: [Source; 2] = [source!("platform.cuh"), source!("scan.cuh")];
