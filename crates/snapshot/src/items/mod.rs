//! Item files: the input of `publish`, read into columns.
//!
//! Two forms say the same thing. A JSON line is `{"id": 1, "embedding": [...], "attributes": {"lang": ["en", "fr"],
//! "year": 2024, "price": 9.5}}`; a Parquet file has `id`, `embedding` and the attributes as flat columns. A file is what its
//! first bytes say, JSON lines may be compressed by gzip, and a folder is all files below it in the order of their paths, as Spark
//! writes one. Vectors may also stand beside either as a `.npy` matrix with one row an item, in the order of the file, or in
//! an index of Faiss.
//!
//! | values in the file | become |
//! |---|---|
//! | strings, booleans, and lists of them | a category of texts, one or many an item |
//! | integers and lists of them | a category of integers, also comparable |
//! | floats | a comparable number, one an item |
//! | lists with a float, all of one length | a dense vector, input of an item tower |
//!
//! No value is changed on the way: what a column cannot keep exactly is an error that names the column and the row.

mod builder;
mod catalogue;
pub mod faiss;
mod features;
mod folder;
mod json;
mod parquet;
mod read;

pub use catalogue::Items;
pub use folder::{FolderTypes, RowFile};
pub use parquet::{batch_rows, open_parquet, unreadable};
pub use read::{ITEM_FILES, check_format, file_of, text_of};
