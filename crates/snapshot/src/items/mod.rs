//! Item files: the input of `publish`, read into columns.
//!
//! There are two equivalent formats. A JSON line is `{"id": 1, "embedding": [...], "attributes": {"lang": ["en", "fr"],
//! "year": 2024, "price": 9.5}}`; a Parquet file has `id`, `embedding` and the attributes as flat columns. The first
//! bytes of a file determine its format; JSON lines may be compressed by gzip. A folder stands for all files below it,
//! in the order of their paths, as Spark writes them. Vectors may also come from a separate `.npy` matrix with one row
//! per item, in the order of the file, or from a Faiss index.
//!
//! | values in the file | become |
//! |---|---|
//! | strings, booleans, and lists of them | a category of texts, one or several per item |
//! | integers and lists of them | a category of integers, also comparable |
//! | floats | a comparable number, one per item |
//! | lists with a float, all of one length | a dense vector, input of an item tower |
//!
//! No value is changed: a value that a column cannot represent exactly is an error that names the column and the row.

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
