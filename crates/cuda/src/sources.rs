//! Source files of the kernels, for compilation by NVRTC.

/// Source file with kernels, or header.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Name of the file.
    pub name: &'static str,
    /// Text of the file.
    pub text: &'static str,
}

macro_rules! source {
    ($name:literal) => {
        Source { name: $name, text: include_str!(concat!("kernels/", $name)) }
    };
}

/// Separately compiled files.
pub const KERNELS: [Source; 12] = [
    source!("scan.cu"),
    source!("topk.cu"),
    source!("merge.cu"),
    source!("ahead.cu"),
    source!("pool.cu"),
    source!("filter.cu"),
    source!("rows.cu"),
    source!("dense.cu"),
    source!("products.cu"),
    source!("value.cu"),
    source!("sort.cu"),
    source!("learn.cu"),
];

/// Headers that the kernel sources include.
pub const HEADERS: [Source; 5] =
    [source!("platform.cuh"), source!("scan.cuh"), source!("digits.cuh"), source!("dense.cuh"), source!("learn.cuh")];

impl Source {
    /// Returns the names of the kernels that the file defines.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        let named = |line: &'static str| {
            let of = line.strip_prefix("KERNEL(").or_else(|| line.strip_prefix("KERNEL_OF_THREE("));
            of?.split(", ").nth(1)
        };
        self.text.lines().filter_map(named)
    }
}

/// Returns the text of a file with its headers inlined.
pub fn whole(source: &Source) -> String {
    let mut included = Vec::new();
    with_headers(source.text, &mut included)
}

fn with_headers(text: &'static str, included: &mut Vec<&'static str>) -> String {
    let mut whole = String::with_capacity(2 * text.len());
    for line in text.lines().filter(|line| *line != "#pragma once") {
        let named = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match HEADERS.iter().find(|header| Some(header.name) == named) {
            Some(header) if included.contains(&header.name) => {}
            Some(header) => {
                included.push(header.name);
                whole.push_str(&with_headers(header.text, included));
            }
            None => {
                whole.push_str(line);
                whole.push('\n');
            }
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_whole_and_name_their_kernels() {
        let mut all = Vec::new();
        for source in &KERNELS {
            let text = whole(source);
            assert_eq!(text.matches("#define EVERY_LANE").count(), 1, "{}", source.name);
            let included = HEADERS.iter().find(|header| text.contains(&format!("#include \"{}\"", header.name)));
            assert!(included.is_none(), "{}: {included:?}", source.name);
            all.extend(source.kernels());
        }
        assert!(all.len() >= 30 && all.contains(&"scan_lists") && all.contains(&"pool_int4"), "{all:?}");
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "two kernels of one name");
    }
}
