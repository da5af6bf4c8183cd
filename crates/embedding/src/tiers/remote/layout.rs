//! Storage layout of a table's rows in the cluster, and the checksums that verify them.
//!
//! - A set of rows is divided into *groups* of `partitions × rows_per_chunk` consecutive rows. Row `i` of a group belongs to
//!   partition `i % partitions`, so that popular rows, such as the head of a table sorted by frequency,
//!   spread over all nodes.
//! - The rows of one group and partition are one string value, a *chunk*, under the key
//!   `sterling:{MODEL/TABLE/CONTENT/PARTITION.SALT}:GROUP`. The hash tag keeps a partition in one slot of the cluster. The salt
//!   is the first number that puts partition `p` of `P` into the `p`-th of `P` equal ranges of slots, so that every node that
//!   owns an equal share of slots owns an equal share of rows.
//! - A chunk is `[rows, row_bytes + 4]` plus 8 bytes: each row is followed by 32 bits of its XXH3, the chunk by 64 bits of XXH3
//!   of everything before. Both hashes are seeded with the load's random id and the row's or chunk's number, so that a row of
//!   another position, version or load is detected.
//! - A chunk fills an allocation class of jemalloc, which Redis and Valkey use, up to the string's own header: 909 rows
//!   of 68 bytes take 72.2 bytes each in the node. One string per row took 144 bytes; hashes, as in HugeCTR, took 128
//!   bytes.

use std::fmt::Write;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::spec::TableSpec;
use sterling_core::error::{Error, Result};

/// Number of slots of a Redis or Valkey Cluster.
pub(super) const SLOTS: usize = 16_384;
/// Maximum bytes per row.
pub(super) const ROW_BYTES_MAX: usize = 128 * 1024;

pub(super) const CHECK_BYTES: usize = 4;
pub(super) const DIGEST_BYTES: usize = 8;
const STRING_HEADER_BYTES: usize = 16;
const CLASS_BYTES: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
const GROUP_BYTES_MAX: usize = 64 << 20;
const PARTITIONS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 200;

/// Name of a set of rows in the cluster: one table of one model, identified by its content. Versions with the same table share
/// the set.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowSet {
    model: String,
    table: String,
    content: u64,
    /// Version number, which names of earlier releases have before the content.
    version: Option<u64>,
}

impl RowSet {
    /// Names a set of rows. `content` distinguishes rows of the same table: a hash of the rows, or of the file that holds them.
    ///
    /// # Errors
    /// `Invalid` if a name is empty, longer than 200 bytes, or has characters other than ASCII letters, digits, `_`, `-` and `.`,
    /// which have no special meaning in a key.
    pub fn new(model: impl Into<String>, table: impl Into<String>, content: u64) -> Result<Self> {
        let named = RowSet { model: model.into(), table: table.into(), content, version: None };
        for (what, name) in [("model", &named.model), ("table", &named.table)] {
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !plain {
                return Err(Error::invalid(format!(
                    "{what} name {name:?}: expected 1 to {NAME_BYTES_MAX} ASCII letters, digits, `_`, `-` or `.`"
                )));
            }
        }
        Ok(named)
    }

    /// Returns the model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the hash of the rows, or of the file that holds them.
    pub fn content(&self) -> u64 {
        self.content
    }

    /// Returns the name of the set within its table, for keys and for operators: 16 hexadecimal digits of the content.
    pub fn tag(&self) -> String {
        match self.version {
            None => format!("{:016x}", self.content),
            Some(version) => format!("{version}-{:016x}", self.content),
        }
    }

    /// Returns the set of the same table with this tag. Earlier releases named sets `VERSION-CONTENT`.
    pub(super) fn tagged(&self, tag: &str) -> Option<Self> {
        let (version, content) = match tag.split_once('-') {
            None => (None, tag),
            Some((version, content)) => (Some(version.parse().ok()?), content),
        };
        let is_content = (1..=16).contains(&content.len()) && content.bytes().all(|b| b.is_ascii_hexdigit());
        let content = u64::from_str_radix(content, 16).ok().filter(|_| is_content)?;
        Some(RowSet { content, version, ..self.clone() })
    }

    /// Returns model and table, as in metric labels.
    pub fn label(&self) -> String {
        format!("{}/{}", self.model, self.table)
    }

    /// Parses the key of a manifest.
    pub(super) fn of_manifest_key(key: &str) -> Option<Self> {
        let mut parts = key.strip_prefix("sterling:{")?.strip_suffix("}:manifest")?.split('/');
        RowSet::new(parts.next()?, parts.next()?, 0).ok()?.tagged(parts.next()?)
    }

    pub(super) fn manifest_key(&self) -> String {
        format!("sterling:{{{}/{}/{}}}:manifest", self.model, self.table, self.tag())
    }

    /// Returns the key that lists all sets of the table.
    pub(super) fn sets_key(&self) -> String {
        format!("sterling:{{{}/{}}}:versions", self.model, self.table)
    }
}

impl std::fmt::Display for RowSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "remote table {}/{} rows {}", self.model, self.table, self.tag())
    }
}

/// Shape of a table, which readers require and loaders store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Number of rows, numbered `0..rows`.
    pub rows: u64,
    /// Bytes per row, scale and bias included.
    pub row_bytes: usize,
    /// Name of the row format, such as `int8`; compared, not interpreted.
    pub format: String,
}

impl TableShape {
    /// Returns the shape of a table.
    ///
    /// # Errors
    /// `Invalid` if the table's width does not suit its format.
    pub fn of(spec: &TableSpec) -> Result<Self> {
        Ok(TableShape { rows: spec.rows, row_bytes: spec.row_bytes()?, format: spec.format.name().to_owned() })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowPlace {
    pub(super) partition: u32,
    pub(super) group: u64,
    /// Offset of the row in its chunk, in bytes.
    pub(super) offset: usize,
}

/// Division of a set of rows into chunks.
#[derive(Clone, Debug)]
pub(super) struct ChunkLayout {
    pub(super) rows: u64,
    pub(super) row_bytes: usize,
    pub(super) rows_per_chunk: usize,
    prefixes: Vec<String>,
    slots: Vec<u16>,
}

impl ChunkLayout {
    /// Returns the best division of a table: the rows per chunk, and the number of partitions.
    pub(super) fn cut(shape: &TableShape) -> Result<(usize, usize)> {
        if shape.rows == 0 || shape.row_bytes == 0 || shape.row_bytes > ROW_BYTES_MAX {
            return Err(Error::invalid(format!(
                "got {} rows of {} bytes, expected at least one row of 1 to {ROW_BYTES_MAX} bytes",
                shape.rows, shape.row_bytes
            )));
        }
        let stride = shape.row_bytes + CHECK_BYTES;
        let rows_of = |class: usize| (class - STRING_HEADER_BYTES - DIGEST_BYTES) / stride;
        let fill = |class: usize| (rows_of(class) * stride) as f64 / class as f64;
        let full = CLASS_BYTES.into_iter().find(|&class| fill(class) >= 0.98);
        let class = full.unwrap_or_else(|| {
            CLASS_BYTES.into_iter().max_by(|&a, &b| fill(a).total_cmp(&fill(b))).expect("there are classes")
        });
        let chunks = shape.rows.div_ceil(rows_of(class) as u64);
        let partitions_max = PARTITIONS_MAX.min(GROUP_BYTES_MAX / class) as u64;
        Ok((rows_of(class), chunks.min(partitions_max).next_power_of_two() as usize))
    }

    pub(super) fn new(named: &RowSet, shape: &TableShape, rows_per_chunk: usize, partitions: usize) -> Self {
        let mut layout = ChunkLayout {
            rows: shape.rows,
            row_bytes: shape.row_bytes,
            rows_per_chunk,
            prefixes: Vec::with_capacity(partitions),
            slots: Vec::with_capacity(partitions),
        };
        for partition in 0..partitions {
            let range = partition * SLOTS / partitions..(partition + 1) * SLOTS / partitions;
            let (prefix, slot) = (0u64..)
                .map(|salt| {
                    let prefix = format!("sterling:{{{}/{}/{partition}.{salt}}}:", named.label(), named.tag());
                    let slot = slot_of(&prefix);
                    (prefix, slot)
                })
                .find(|(_, slot)| range.contains(&(*slot as usize)))
                .expect("salts do not end, and the hash reaches every slot");
            layout.prefixes.push(prefix);
            layout.slots.push(slot);
        }
        layout
    }

    pub(super) fn partitions(&self) -> usize {
        self.slots.len()
    }

    /// Returns the bytes of a row with its checksum.
    pub(super) fn stride(&self) -> usize {
        self.row_bytes + CHECK_BYTES
    }

    pub(super) fn group_rows(&self) -> u64 {
        (self.rows_per_chunk * self.partitions()) as u64
    }

    pub(super) fn groups(&self) -> u64 {
        self.rows.div_ceil(self.group_rows())
    }

    pub(super) fn place(&self, row: u64) -> RowPlace {
        let within = row % self.group_rows();
        let partitions = self.partitions() as u64;
        RowPlace {
            partition: (within % partitions) as u32,
            group: row / self.group_rows(),
            offset: (within / partitions) as usize * self.stride(),
        }
    }

    /// Returns the row at this index of a chunk.
    pub(super) fn row_of(&self, group: u64, partition: usize, index: usize) -> u64 {
        group * self.group_rows() + (index * self.partitions() + partition) as u64
    }

    /// Returns the number of rows of one chunk: `first, first + partitions, ...`.
    pub(super) fn chunk_rows(&self, group: u64, partition: usize) -> usize {
        let rows = (self.rows - group * self.group_rows()).min(self.group_rows()) as usize;
        rows / self.partitions() + usize::from(partition < rows % self.partitions())
    }

    pub(super) fn key(&self, group: u64, partition: usize) -> String {
        let mut key = String::new();
        self.write_key(&mut key, group, partition);
        key
    }

    /// Replaces the contents of `key` with the key of a chunk.
    pub(super) fn write_key(&self, key: &mut String, group: u64, partition: usize) {
        key.clear();
        key.push_str(&self.prefixes[partition]);
        // Writing to a string cannot fail.
        let _ = write!(key, "{group}");
    }

    pub(super) fn slot(&self, partition: usize) -> u16 {
        self.slots[partition]
    }

    /// Encodes the chunk of one partition of a group, from the group's rows `[rows, row_bytes]`.
    pub(super) fn encode(&self, load: u64, group: u64, partition: usize, group_bytes: &[u8]) -> Vec<u8> {
        let rows = self.chunk_rows(group, partition);
        let mut chunk = Vec::with_capacity(rows * self.stride() + DIGEST_BYTES);
        for index in 0..rows {
            let within = index * self.partitions() + partition;
            let bytes = &group_bytes[within * self.row_bytes..][..self.row_bytes];
            chunk.extend_from_slice(bytes);
            chunk.extend_from_slice(&row_check(load, self.row_of(group, partition, index), bytes));
        }
        let digest = self.digest(load, group, partition, &chunk);
        chunk.extend_from_slice(&digest);
        chunk
    }

    fn digest(&self, load: u64, group: u64, partition: usize, rows: &[u8]) -> [u8; DIGEST_BYTES] {
        let number = group * self.partitions() as u64 + partition as u64;
        xxh3_64_with_seed(rows, load.rotate_left(32) ^ number).to_le_bytes()
    }
}

/// Returns the slot of a key: CRC-16/XMODEM of its hash tag, or of the complete key.
pub(super) fn slot_of(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(key, |(tag, _)| tag);
    let crc = tag.bytes().fold(0u16, |crc, byte| (crc << 8) ^ CRC[usize::from((crc >> 8) as u8 ^ byte)]);
    crc % SLOTS as u16
}

const CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn row_check(load: u64, row: u64, bytes: &[u8]) -> [u8; CHECK_BYTES] {
    (xxh3_64_with_seed(bytes, load ^ row.wrapping_mul(0x9e37_79b9_7f4a_7c15)) as u32).to_le_bytes()
}

/// Returns the row's bytes if the checksum shows that the received bytes are the row `row` of the load `load`.
pub(super) fn checked(load: u64, row: u64, row_bytes: usize, came: &[u8]) -> Option<&[u8]> {
    let (bytes, check) = came.split_at_checked(row_bytes)?;
    (check == row_check(load, row, bytes)).then_some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use redis::cluster_routing::Slot;

    fn layout_of(rows: u64, row_bytes: usize) -> ChunkLayout {
        let shape = TableShape { rows, row_bytes, format: "int8".into() };
        let named = RowSet::new("debian", "packages", 0xfeed).unwrap();
        let (rows_per_chunk, partitions) = ChunkLayout::cut(&shape).unwrap();
        ChunkLayout::new(&named, &shape, rows_per_chunk, partitions)
    }

    #[test]
    fn slots_are_those_of_the_client() {
        for key in ["123456789", "foo", "sterling:{debian/packages/3/17.4}:12", "{a}b", "a{b"] {
            assert_eq!(Slot::new(slot_of(key)), Some(Slot::for_key(key)), "{key}");
        }
        assert_eq!(slot_of("123456789"), 0x31c3);
    }

    #[test]
    fn partitions_share_the_slots_evenly_and_keys_stay_in_their_slot() {
        let layout = layout_of(10_000_000, 68);
        assert_eq!((layout.rows_per_chunk, layout.partitions()), (909, 256));
        for partition in 0..256 {
            assert_eq!(usize::from(layout.slot(partition)) * 256 / SLOTS, partition);
            assert_eq!(slot_of(&layout.key(41, partition)), layout.slot(partition));
        }
    }

    #[test]
    fn sets_are_read_back_from_their_keys() {
        let named = RowSet::new("debian", "packages-2", 0xfeed).unwrap();
        assert_eq!(named.to_string(), "remote table debian/packages-2 rows 000000000000feed");
        let earlier = named.tagged("3-000000000000feed").unwrap();
        assert_eq!(earlier.to_string(), "remote table debian/packages-2 rows 3-000000000000feed");
        for set in [&named, &earlier] {
            assert_eq!(RowSet::of_manifest_key(&set.manifest_key()).as_ref(), Some(set));
        }
        for invalid in [
            "sterling:{a/b/x}:manifest",
            "sterling:{a/b/x-1}:manifest",
            "sterling:{a/3-1}:manifest",
            "sterling:{a/b/+3}:manifest",
            "a",
        ] {
            assert_eq!(RowSet::of_manifest_key(invalid), None, "{invalid}");
        }
        assert_eq!((earlier.content(), named.tagged("1")), (0xfeed, RowSet::new("debian", "packages-2", 1).ok()));
    }

    #[test]
    fn chunks_fill_their_allocation_class() {
        for row_bytes in [1, 20, 36, 68, 128, 256, 1032, 4096, 32_768, ROW_BYTES_MAX] {
            let layout = layout_of(100_000_000, row_bytes);
            let bytes = layout.rows_per_chunk * layout.stride() + DIGEST_BYTES + STRING_HEADER_BYTES;
            let class = CLASS_BYTES.into_iter().find(|&c| bytes <= c).unwrap();
            assert!(bytes as f64 > 0.87 * class as f64, "{row_bytes}: {bytes} of {class}");
            assert!(layout.group_rows() as usize * row_bytes <= GROUP_BYTES_MAX);
        }
    }

    #[test]
    fn names_and_shapes_that_cannot_be_stored_are_rejected() {
        for name in ["", "a{b", "a}b", "a/b", "a b", "ä", "a:b", &"x".repeat(201)] {
            assert!(RowSet::new(name, "t", 0).is_err(), "{name}");
            assert!(RowSet::new("m", name, 0).is_err(), "{name}");
        }
        for (rows, row_bytes) in [(0, 68), (1, 0), (1, ROW_BYTES_MAX + 1)] {
            assert!(ChunkLayout::cut(&TableShape { rows, row_bytes, format: "f32".into() }).is_err());
        }
    }

    #[test]
    fn a_row_is_accepted_only_with_its_own_load_number_and_bytes() {
        let layout = layout_of(5000, 68);
        let group_bytes: Vec<u8> = (0..5000 * 68).map(|i| (i * 31 % 251) as u8).collect();
        let chunk = layout.encode(9, 0, 1, &group_bytes);
        let place = layout.place(layout.partitions() as u64 + 1);
        let came = chunk[place.offset..][..layout.stride()].to_vec();
        let row = layout.partitions() as u64 + 1;
        assert_eq!(checked(9, row, 68, &came), Some(&group_bytes[row as usize * 68..][..68]));
        assert_eq!(checked(8, row, 68, &came), None, "another load");
        assert_eq!(checked(9, row + 1, 68, &came), None, "another row");
        for at in 0..came.len() {
            let mut broken = came.clone();
            broken[at] ^= 0x10;
            assert_eq!(checked(9, row, 68, &broken), None, "byte {at} changed");
            assert_eq!(checked(9, row, 68, &came[..at]), None, "cut at {at}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_row_is_in_exactly_one_chunk(rows in 1u64..40_000, row_bytes in 1usize..3000) {
            let layout = layout_of(rows, row_bytes);
            let mut filled = std::collections::HashMap::new();
            for row in 0..rows {
                let place = layout.place(row);
                prop_assert_eq!(place.offset % layout.stride(), 0);
                let index = place.offset / layout.stride();
                prop_assert_eq!(layout.row_of(place.group, place.partition as usize, index), row);
                prop_assert!(index < layout.chunk_rows(place.group, place.partition as usize));
                prop_assert!(place.group < layout.groups());
                *filled.entry((place.group, place.partition)).or_insert(0) += 1;
            }
            for ((group, partition), count) in filled {
                prop_assert_eq!(count, layout.chunk_rows(group, partition as usize));
            }
            let total: usize = (0..layout.groups())
                .flat_map(|g| (0..layout.partitions()).map(move |p| (g, p)))
                .map(|(g, p)| layout.chunk_rows(g, p))
                .sum();
            prop_assert_eq!(total as u64, rows);
        }
    }
}
