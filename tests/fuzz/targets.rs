//! Fuzzing targets. Each target describes the outcome of an input in a word; a panic or a violated invariant is a defect.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use sterling::api;
use sterling::embedding::KeyedJaggedTensor;
use sterling::error::{Error, Result};
use sterling::index::columns::Columns;
use sterling::index::filter;
use sterling::index::ivf::{self, Index, Probing};
use sterling::index::topk::Selector;
use sterling::index::value::{Program, Scratch};
use sterling::journal::{Journal as _, Log, LogOptions};
use sterling::snapshot::items::faiss::IndexFile;
use sterling::snapshot::{MANIFEST, Manifest, Recipe, SHARDS_FILE, Shards};
use sterling::storage::files::Tensors;
use sterling::storage::npy;
use sterling::units::Slot;

/// A parser of external input.
pub struct Target {
    /// Name of its corpus folder.
    pub name: &'static str,
    /// Runs an input and returns its outcome; `folder` is for files.
    pub run: fn(bytes: &[u8], folder: &Path) -> String,
    /// Pieces that its inputs are composed of.
    pub words: &'static [&'static str],
}

const JSON: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "null",
    "true",
    "-0",
    "1e999",
    "1e-999",
    "18446744073709551616",
    "9223372036854775808",
    "-1",
    "0.5",
    "\"\\ud800\"",
    "\\u0000",
    "\"k\":",
    "\"vector\":",
    "\"features\":",
    "\"filter\":",
    "\"requests\":",
    "\"items\":",
    "\"exclude\":",
    "\"constants\":",
    "\"values\":",
    "\"weights\":",
    "\"ids\":",
    "\"embedding\":",
    "\"attributes\":",
    "\u{feff}",
    "\n",
];

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "filter",
        run: filter,
        words: &[
            "AND",
            "OR",
            "NOT",
            "IN",
            "(",
            ")",
            "[",
            "]",
            ":",
            "=",
            "!=",
            "<",
            "<=",
            ">",
            ">=",
            "*",
            "!",
            "&",
            "|",
            "\"",
            "\\",
            ",",
            "a:1",
            "a:\"x\"",
            "9223372036854775808",
            "-9223372036854775808",
            "1e999",
            "\u{0}",
            "\u{fc}",
            " ",
            "((((((((",
            "NOT NOT NOT ",
        ],
    },
    Target {
        name: "value",
        run: value,
        words: &[
            "+", "-", "*", "/", "(", ")", ",", "min", "max", "exp", "log", "sqrt", "clip", "pow", "if", "a", "b", "w",
            "1e38", "1e-45", "1e999", "0", ".", "((((((((", "-----", "\u{fc}",
        ],
    },
    Target { name: "requests", run: requests, words: JSON },
    Target {
        name: "manifest",
        run: manifest,
        words: &[
            "\"format\":",
            "\"name\":",
            "\"version\":",
            "\"files\":",
            "\"items\":",
            "\"shard\":",
            "\"graphs\":",
            "..",
            "/",
            "\\",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "null",
            "-1",
            "0",
            "18446744073709551616",
            "1e30",
            "\u{0}",
            "\n[",
            "=",
            "\"xxh3\":",
            "lists = ",
            "probes = ",
        ],
    },
    Target {
        name: "safetensors",
        run: safetensors,
        words: &[
            "{",
            "}",
            "\"dtype\":\"F32\"",
            "\"dtype\":\"U8\"",
            "\"dtype\":\"F64\"",
            "\"shape\":[",
            "\"data_offsets\":[0,",
            "18446744073709551615",
            "]",
            ",",
            "__metadata__",
            "\u{0}\u{0}\u{0}\u{0}",
        ],
    },
    Target {
        name: "index",
        run: index,
        words: &[
            "\u{0}\u{0}\u{0}\u{0}",
            "\u{1}\u{0}\u{0}\u{0}",
            "\u{7f}",
            "\"centroids\"",
            "\"list_lengths\"",
            "\"codes\"",
            "\"first_pass_codes\"",
            "\"first_pass_values\"",
            "\"penalties\"",
            "\"rows\"",
            "\"planes\"",
            "\"shape\":[",
            "\"dtype\":\"U8\"",
            "\"dtype\":\"F16\"",
            "]",
            ",",
        ],
    },
    Target {
        name: "faiss",
        run: faiss,
        words: &["IwFl", "IxFI", "IwSq", "IxMp", "IxM2", "ilar", "full", "sprs", "\u{0}\u{0}\u{0}\u{0}", "\u{7f}"],
    },
    Target { name: "journal", run: journal, words: &["\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}", "\u{1}", "\u{7f}"] },
    Target { name: "jagged", run: jagged, words: &["\u{0}", "\u{1}", "\u{7f}"] },
    Target {
        name: "arrow",
        run: arrow,
        words: &[
            "\u{0}\u{0}\u{0}\u{0}",
            "\u{7f}",
            "\u{1}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}",
            "vector",
            "features.a",
            "features.a.weights",
            "filter",
            "exclude",
            "id",
            "embedding",
            "attributes.",
            "set.",
            "sterling",
            "{\"k\": 1}",
        ],
    },
    Target {
        name: "npy",
        run: npy,
        words: &[
            "'descr': ",
            "'<f4'",
            "'>f8'",
            "'|O'",
            "'fortran_order': True",
            "'shape': (",
            "18446744073709551615",
            ", ",
            ")",
            "}",
            "\u{93}NUMPY",
            "\n",
        ],
    },
];

fn reported<T>(result: Result<T>) -> String {
    result.map_or_else(|e| e.to_string(), |_| "taken".into())
}

fn filter(bytes: &[u8], _: &Path) -> String {
    let Ok(text) = std::str::from_utf8(bytes) else { return "no text".into() };
    let parsed = filter::parse(text);
    if let Err(e) = &parsed {
        assert!(e.offset().is_none_or(|offset| offset <= text.len()), "an error beyond the text: {e}");
    }
    reported(parsed.map(|parsed| {
        let canonical = parsed.canonical();
        let again = filter::parse(&canonical.to_string()).map(|again| again.canonical());
        assert_eq!(again.as_ref().ok(), Some(&canonical), "the canonical form means something else");
    }))
}

fn value(bytes: &[u8], _: &Path) -> String {
    let Ok(text) = std::str::from_utf8(bytes) else { return "no text".into() };
    let constants = BTreeMap::from([("w".to_owned(), 0.5)]);
    reported(Program::compile(text, &["a", "b"], &constants).and_then(|program| {
        let (rows, mut out) = ([1.5_f32, -2.0, 0.0], [0.0; 3]);
        let inputs: Vec<&[f32]> = program.inputs().iter().map(|_| &rows[..]).collect();
        program.evaluate(&inputs, &program.constants(&BTreeMap::new())?, &mut Scratch::default(), &mut out);
        Ok(())
    }))
}

fn requests(bytes: &[u8], _: &Path) -> String {
    let all = [
        reported(api::retrievals(bytes)),
        reported(api::rank(bytes)),
        reported(api::embed(bytes)),
        reported(api::upserts(bytes, false)),
        reported(api::upserts(bytes, true)),
        reported(api::deletion(bytes)),
        reported(api::inference("m", bytes, None, &BTreeSet::from(["a", "b"]))),
        reported(api::inference("m", bytes, Some(bytes.len() / 2), &BTreeSet::new())),
    ];
    all.join("; ")
}

fn manifest(bytes: &[u8], folder: &Path) -> String {
    put(folder, MANIFEST, bytes);
    put(folder, SHARDS_FILE, bytes);
    let recipe = std::str::from_utf8(bytes).map_or("no text".into(), |text| reported(Recipe::parse(text)));
    let complete = Manifest::read(folder).and_then(|manifest| {
        manifest.digest();
        manifest.verify(folder)
    });
    [reported(complete), reported(Shards::read(folder)), recipe].join("; ")
}

fn safetensors(bytes: &[u8], folder: &Path) -> String {
    let path = put(folder, "x.safetensors", bytes);
    reported(Tensors::read(&path).map(|tensors| {
        let names: Vec<String> = tensors.names().map(str::to_owned).collect();
        for name in &names {
            for dimensions in 0..4 {
                // A returned tensor must have the declared shape.
                if let Ok((values, shape)) = tensors.get::<f32>(name, dimensions) {
                    assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
                }
                let _ = tensors.get::<u8>(name, dimensions);
            }
        }
    }))
}

/// Opens the files that searches read, all in one: lists with their codes, columns, and the planes and posting lists over both.
fn index(bytes: &[u8], folder: &Path) -> String {
    let path = put(folder, "index.safetensors", bytes);
    let tensors = match Tensors::read(&path) {
        Ok(tensors) => tensors,
        Err(e) => return e.to_string(),
    };
    let index = match Index::open(&tensors) {
        Ok(index) => index,
        Err(e) => return e.to_string(),
    };
    let columns = Columns::open(&tensors, index.slots());
    let filter = columns
        .as_ref()
        .ok()
        .map(|columns| filter::Index::open(&tensors, index.list_offsets(), index.list_lengths(), columns.terms()));
    // Everything that opens must be searchable and readable.
    let (mut found, mut scratch) = (Selector::new(), ivf::Scratch::default());
    for by_codes in [false, true] {
        for vector in [vec![0.0; index.dimension()], vec![-1.5; index.dimension()]] {
            let probing = Probing { by_codes, ..Probing::of(index.lists().div_ceil(2), index.lists()) };
            found.reset(5);
            index.search(&vector, probing, None, &mut found, 5, &mut scratch);
            assert!(found.finish().len() <= 5);
        }
    }
    for column in columns.iter().flat_map(Columns::list) {
        (0..index.slots().min(200)).for_each(|slot| drop(column.cell(Slot(slot as u32))));
    }
    format!("index; {}; {}", reported(columns), filter.map_or_else(String::new, reported))
}

fn faiss(bytes: &[u8], folder: &Path) -> String {
    let path = put(folder, "x.index", bytes);
    reported(IndexFile::open(&path).and_then(|index| {
        let count = index.ids().len().min(50) as u32;
        let vectors = index.vectors(&(0..count).collect::<Vec<_>>())?;
        assert_eq!(vectors.len(), count as usize * index.dimension());
        Ok(())
    }))
}

fn journal(bytes: &[u8], folder: &Path) -> String {
    let folder = folder.join("journal");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    put(&folder, "00000000000000000001.log", bytes);
    reported(Log::open(&folder, LogOptions::default()).and_then(|log| {
        let mut follower = log.follow(log.first().saturating_sub(1))?;
        let mut last = None;
        while let Some(record) = follower.next(Duration::ZERO)? {
            assert!(last.is_none_or(|last| record.position == last + 1), "records follow one another");
            last = Some(record.position);
        }
        assert_eq!(last.unwrap_or(0), log.last(), "all that is there is read");
        Ok(())
    }))
}

/// Decodes bytes as numbers: the first is the number of keys, then come lengths, then ids.
fn jagged(bytes: &[u8], _: &Path) -> String {
    let Some((&keys, rest)) = bytes.split_first() else { return "empty".into() };
    let keys: Vec<String> = (0..keys % 8).map(|key| (key % 5).to_string()).collect();
    let (lengths, values) = rest.split_at(rest.len() / 2);
    let lengths: Vec<i64> = lengths.iter().map(|&x| if x == 255 { i64::MAX } else { i64::from(x as i8) }).collect();
    let values: Vec<i64> = values.iter().map(|&x| i64::from(x)).collect();
    let weights = bytes.len().is_multiple_of(3).then(|| vec![0.5; values.len()]);
    let by_offsets = KeyedJaggedTensor::from_offsets(keys.clone(), values.clone(), &lengths, weights.clone());
    let by_lengths = KeyedJaggedTensor::from_lengths(keys.clone(), values, &lengths, weights);
    let turned = |tensor: &KeyedJaggedTensor| -> Result<()> {
        let order: Vec<usize> = (0..tensor.keys().len()).rev().collect();
        let back = tensor.permute(&order)?.permute(&order)?;
        if back != *tensor {
            return Err(Error::internal("permuted there and back is another"));
        }
        let parts = tensor.split(&[tensor.keys().len()])?;
        let length: usize = tensor.length_per_key().sum();
        assert_eq!(length, tensor.values().len());
        assert_eq!(KeyedJaggedTensor::concat(&parts.iter().collect::<Vec<_>>())?, *tensor);
        Ok(())
    };
    for tensor in by_lengths.iter().chain(&by_offsets) {
        turned(tensor).unwrap();
    }
    format!("{}; {}", reported(by_lengths), reported(by_offsets))
}

fn arrow(bytes: &[u8], _: &Path) -> String {
    // Ends where a server would reject the request because of its memory.
    let hold = |held: &mut usize, more: usize| {
        *held += more;
        if *held > 32 << 20 { Err(Error::too_costly("more than there is")) } else { Ok(()) }
    };
    let mut held = [0; 3];
    let [of_requests, of_items, of_shards] = &mut held;
    let requests = api::arrow_retrievals(bytes, &mut |more| hold(of_requests, more));
    let items = api::arrow_upserts(bytes, &mut |more| hold(of_items, more));
    let parts = api::arrow_divided(bytes, 3, &mut |more| hold(of_shards, more));
    if let (Ok(items), Ok((parts, refused))) = (&items, &parts) {
        let places: usize = parts.iter().map(|(places, _)| places.len()).sum();
        assert_eq!(places + refused.len(), items.len(), "each item has one place");
    }
    [reported(requests), reported(items), reported(parts)].join("; ")
}

fn npy(bytes: &[u8], folder: &Path) -> String {
    let path = put(folder, "x.npy", bytes);
    let floats = npy::read_f32(&path).inspect(|(values, rows, width)| assert_eq!(values.len(), rows * width));
    [reported(floats), reported(npy::read_i64(&path))].join("; ")
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}
