//! Tokenizers map texts to rows of a table, by a `tokenizer.json` in the format of Hugging Face's
//! [`tokenizers`](https://github.com/huggingface/tokenizers) (WordPiece, byte-level BPE, Unigram).
//!
//! The file comes with a model package and is untrusted: the size of the file, the lengths of its vocabulary pieces, the growth
//! of texts by its normalizer and the bytes of a text that are tokenized are bounded, and panics of the library become errors.
//! Truncation and padding stated by the file are ignored, because the length is a setting of the feature.

#[cfg(feature = "text")]
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "text")]
use sterling_core::error::panic_message;
use sterling_core::error::{Error, Result};

/// Maximum size of a `tokenizer.json`, in bytes.
#[cfg(feature = "text")]
const FILE_BYTES_MAX: usize = 64 << 20;
/// Number of bytes of a text that are tokenized, per token of the feature's length.
#[cfg(feature = "text")]
const BYTES_PER_TOKEN: usize = 32;
/// Maximum factor by which normalizers and pre-tokenizers may lengthen a text. The factor of T5's tokenizer is about 400.
#[cfg(feature = "text")]
const GROWTH_MAX: usize = 1024;
/// Maximum `max_input_chars_per_word`: WordPiece takes cubic time in a word's length.
#[cfg(feature = "text")]
const WORD_CHARS_MAX: usize = 200;
/// Maximum bytes of a Unigram piece, and of the prefix or suffix that a model adds to the parts of a word. The library compares
/// each position of a text with whole pieces, copies prefixes and suffixes for each attempt, and frees its trie of pieces with
/// one stack frame per byte.
#[cfg(feature = "text")]
const PIECE_BYTES_MAX: usize = 256;
/// Maximum bytes of all Unigram pieces: the library needs about 100 bytes of memory per byte of a piece.
#[cfg(feature = "text")]
const PIECES_BYTES_MAX: usize = 16 << 20;
/// Types of normalizers and pre-tokenizers in version 0.23 of the library. The library also accepts a part without a
/// type and infers the type from its fields; such a part is rejected, because [`growth`] could misjudge it.
#[cfg(feature = "text")]
const PART_TYPES: [&str; 24] = [
    "BertNormalizer",
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Lowercase",
    "Metaspace",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Punctuation",
    "Replace",
    "Sequence",
    "Split",
    "Strip",
    "StripAccents",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
];

/// Tokenizer of the texts of a table.
#[derive(Debug)]
pub struct Tokenizer {
    #[cfg(feature = "text")]
    inner: tokenizers::Tokenizer,
    /// Number of special tokens that are added to a text.
    added: usize,
    rows: u64,
}

/// Part of a text that is retained if the text has too many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retained {
    /// Retains the beginning of a text that is too long.
    First,
    /// Retains the end of a text that is too long.
    Last,
}

impl Tokenizer {
    /// Returns the number of rows that the tokens need: the highest id, plus one.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of special tokens that are added to every text.
    pub fn added(&self) -> usize {
        self.added
    }
}

#[cfg(not(feature = "text"))]
impl Tokenizer {
    /// Rejects the file, because this build has no tokenizers.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn parse(_: &[u8]) -> Result<Self> {
        Err(Error::unsupported("this build has no tokenizers, expected a build with the cargo feature `text`"))
    }

    /// Returns no ids: no tokenizer can be created in this build.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn encode(&self, _: &str, _: usize, _: Retained) -> Result<Vec<i64>> {
        Err(Error::unsupported("this build has no tokenizers"))
    }
}

#[cfg(feature = "text")]
impl Tokenizer {
    /// Parses a `tokenizer.json`.
    ///
    /// # Errors
    /// `Invalid` with the reason: the file is too large or malformed, has random parts (BPE dropout), or normalizers that may
    /// make texts more than 1,024 times as long.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > FILE_BYTES_MAX {
            return Err(Error::invalid(format!("got {} bytes, expected at most {FILE_BYTES_MAX}", bytes.len())));
        }
        let header: Header =
            serde_json::from_slice(bytes).map_err(|e| Error::invalid(format!("not a tokenizer.json: {e}")))?;
        if let Some(dropout) = header.model.dropout.filter(|dropout| *dropout != 0.0) {
            return Err(Error::invalid(format!("model.dropout: got {dropout}, expected null: tokens would be random")));
        }
        if let Some(most) = header.model.max_input_chars_per_word.filter(|most| *most > WORD_CHARS_MAX) {
            return Err(Error::invalid(format!(
                "model.max_input_chars_per_word: got {most}, expected at most {WORD_CHARS_MAX}"
            )));
        }
        header.model.check_pieces()?;
        let mut growth = 1usize;
        for (name, part) in [("normalizer", &header.normalizer), ("pre_tokenizer", &header.pre_tokenizer)] {
            if let Some(part) = part.as_ref().filter(|part| !part.is_null()) {
                growth = growth.saturating_mul(self::growth(part).map_err(|e| e.within(name))?);
            }
        }
        if growth > GROWTH_MAX {
            return Err(Error::invalid(format!(
                "normalizer, pre_tokenizer: may make a text {growth} times as long, expected at most {GROWTH_MAX} times"
            )));
        }
        let inner = guarded(|| tokenizers::Tokenizer::from_bytes(bytes))?;
        let mut inner = inner.map_err(|e| Error::invalid(format!("not a tokenizer.json: {e}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::invalid(e.to_string()))?;
        let ids = inner.get_vocab(true);
        let highest =
            ids.values().copied().map(u64::from).chain(header.post_processor.iter().flat_map(special_ids)).max();
        let rows = highest.map_or(0, |id| id.saturating_add(1));
        let processor = inner.get_post_processor();
        let added = processor.map_or(0, |processor| tokenizers::PostProcessor::added_tokens(processor, false));
        Ok(Tokenizer { inner, added, rows })
    }

    /// Returns the ids of a text's tokens, special tokens included, at most `length`. Of longer texts the first or the last tokens
    /// are retained. Reads at most 32 bytes of the text per token of `length`, or 1,024 bytes if that is more.
    ///
    /// # Errors
    /// `Invalid` if the special tokens do not fit, or the tokenizer fails.
    pub fn encode(&self, text: &str, length: usize, retained: Retained) -> Result<Vec<i64>> {
        let room = length.checked_sub(self.added).filter(|room| *room > 0).ok_or_else(|| {
            Error::invalid(format!("length: got {length}, expected more than the {} special tokens", self.added))
        })?;
        let text = shortened(text, length.saturating_mul(BYTES_PER_TOKEN).max(1024), retained);
        let encode = || {
            let mut tokens = self.inner.encode_fast(text, false)?;
            let direction = match retained {
                Retained::First => tokenizers::TruncationDirection::Right,
                Retained::Last => tokenizers::TruncationDirection::Left,
            };
            tokens.truncate(room, 0, direction);
            tokens.take_overflowing();
            self.inner.post_process(tokens, None, true)
        };
        let tokens = guarded(encode)?.map_err(|e| Error::invalid(format!("the tokenizer failed: {e}")))?;
        match tokens.get_ids().len() <= length {
            true => Ok(tokens.get_ids().iter().map(|&id| i64::from(id)).collect()),
            false => Err(Error::invalid("the tokenizer adds more special tokens than it states")),
        }
    }
}

/// Fields of the file that are validated.
#[cfg(feature = "text")]
#[derive(serde::Deserialize)]
struct Header {
    normalizer: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    post_processor: Option<serde_json::Value>,
    model: Model,
}

#[cfg(feature = "text")]
#[derive(serde::Deserialize)]
struct Model {
    dropout: Option<f64>,
    max_input_chars_per_word: Option<usize>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    vocab: PieceSizes,
}

#[cfg(feature = "text")]
impl Model {
    /// Rejects pieces that make the library slow or overflow its stack.
    fn check_pieces(&self) -> Result<()> {
        let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        for (what, bytes, most) in [
            ("vocab: the longest piece", self.vocab.longest, PIECE_BYTES_MAX),
            ("vocab: all pieces", self.vocab.all, PIECES_BYTES_MAX),
            ("continuing_subword_prefix", length(&self.continuing_subword_prefix), PIECE_BYTES_MAX),
            ("end_of_word_suffix", length(&self.end_of_word_suffix), PIECE_BYTES_MAX),
        ] {
            if bytes > most {
                return Err(Error::invalid(format!("model.{what}: got {bytes} bytes, expected at most {most}")));
            }
        }
        Ok(())
    }
}

/// Sizes of the pieces of a Unigram vocabulary, a list of pieces and scores, in bytes; 0 for the maps of other models.
#[cfg(feature = "text")]
#[derive(Default)]
struct PieceSizes {
    longest: usize,
    all: usize,
}

#[cfg(feature = "text")]
impl<'de> serde::Deserialize<'de> for PieceSizes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};

        struct Sizes;

        impl<'de> Visitor<'de> for Sizes {
            type Value = PieceSizes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of tokens, or a list of pieces with scores")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pieces: A) -> std::result::Result<PieceSizes, A::Error> {
                let mut sizes = PieceSizes::default();
                while let Some((piece, _)) = pieces.next_element::<(String, IgnoredAny)>()? {
                    sizes.longest = sizes.longest.max(piece.len());
                    sizes.all += piece.len();
                }
                Ok(sizes)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut tokens: A) -> std::result::Result<PieceSizes, A::Error> {
                while tokens.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(PieceSizes::default())
            }
        }

        deserializer.deserialize_any(Sizes)
    }
}

/// Returns the ids of special tokens that a post-processor states: `ids` of templates, `["[SEP]", 102]` of BERT and RoBERTa.
#[cfg(feature = "text")]
fn special_ids(part: &serde_json::Value) -> Vec<u64> {
    use serde_json::Value;
    match part {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| match (name.as_str(), value.as_array()) {
                ("ids" | "sep" | "cls", Some(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
                _ => special_ids(value),
            })
            .collect(),
        Value::Array(parts) => parts.iter().flat_map(special_ids).collect(),
        _ => Vec::new(),
    }
}

/// Returns a bound on the factor by which a normalizer or pre-tokenizer lengthens a text.
///
/// # Errors
/// `Invalid` for a part of an unknown type.
#[cfg(feature = "text")]
fn growth(part: &serde_json::Value) -> Result<usize> {
    let lists = ["normalizers", "pretokenizers"].into_iter().filter_map(|list| part.get(list)?.as_array());
    let mut inner = 1usize;
    for part in lists.flatten() {
        inner = inner.saturating_mul(growth(part)?);
    }
    let text = |field: &str| part.get(field).and_then(serde_json::Value::as_str);
    let bytes = |field: &str| text(field).map_or(0, str::len);
    // A pattern that matches the empty string inserts `content` next to every character.
    let is_literal =
        part.pointer("/pattern/String").and_then(|pattern| pattern.as_str()).is_some_and(|p| !p.is_empty());
    let own = match text("type") {
        Some("ByteLevel") => 3,
        Some("Replace") => bytes("content") + usize::from(!is_literal),
        Some("Precompiled") => longest_replacement(text("precompiled_charsmap").unwrap_or_default()),
        Some("Prepend") => bytes("prepend"),
        Some("Metaspace") => bytes("replacement"),
        Some(name) if PART_TYPES.contains(&name) => 1,
        other => {
            let found = other.map_or("none".to_owned(), |name| format!("`{name}`"));
            return Err(Error::invalid(format!("type: got {found}, expected one of {}", PART_TYPES.join(", "))));
        }
    };
    Ok(inner.saturating_mul(own.max(1)))
}

/// Returns the bytes of the longest text that a character map of SentencePiece writes for a character. The map is the size of a
/// trie (four bytes, little-endian), the trie, then the texts, each ended by a zero, all in base64.
#[cfg(feature = "text")]
fn longest_replacement(map: &str) -> usize {
    use base64::Engine as _;
    let Ok(bytes) = base64::engine::general_purpose::STANDARD.decode(map) else { return usize::MAX };
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or(rest);
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(1)
}

/// Returns the beginning or the end of a text, of at most this many bytes.
#[cfg(feature = "text")]
fn shortened(text: &str, most: usize, retained: Retained) -> &str {
    let left_out = text.len().saturating_sub(most);
    match retained {
        Retained::First => &text[..text.floor_char_boundary(text.len() - left_out)],
        Retained::Last => &text[text.ceil_char_boundary(left_out)..],
    }
}

/// Calls the library and catches its panics.
#[cfg(feature = "text")]
fn guarded<T>(call: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|panic| Error::invalid(format!("the tokenizer failed: {}", panic_message(&*panic))))
}

#[cfg(all(test, feature = "text"))]
mod tests;
