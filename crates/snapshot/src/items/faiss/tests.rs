//! Tests with index files that are built field by field, and with corrupt fields.

#![allow(clippy::unwrap_used)]
use super::*;
use sterling_core::error::Kind;

/// Named fields of a file in order: an `IxM2` of an `IwSq` with 8-bit residuals, three vectors in three lists.
type Fields = Vec<(&'static str, Vec<u8>)>;

fn numbers<const N: usize>(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()[..N].to_vec()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn header(names: [&'static str; 6], fourcc: &[u8; 4], vectors: u64, metric: u64) -> Fields {
    let [name, d, count, unused, trained, kind] = names;
    vec![
        (name, fourcc.to_vec()),
        (d, numbers::<4>(&[2])),
        (count, numbers::<8>(&[vectors])),
        (unused, vec![9; 16]),
        (trained, vec![1]),
        (kind, numbers::<4>(&[metric])),
    ]
}

fn fields() -> Fields {
    let mut all = header(["map", "map d", "map n", "", "map trained", "map metric"], b"IxM2", 3, 0);
    all.extend(header(["index", "d", "n", "", "trained", "metric"], b"IwSq", 3, 0));
    all.extend([("lists", numbers::<8>(&[3])), ("probes", numbers::<8>(&[1]))]);
    all.extend(header(["coarse", "coarse d", "coarse n", "", "coarse trained", "coarse metric"], b"IxF2", 3, 1));
    all.extend([
        ("centroid numbers", numbers::<8>(&[6])),
        ("centroids", floats(&[1.0, 0.0, 0.0, 1.0, 5.0, 5.0])),
        ("direct map", vec![2]),
        ("direct array", numbers::<8>(&[1, 7])),
        ("direct table", numbers::<8>(&[1, 7, 8])),
        ("type", numbers::<4>(&[0])),
        ("range", vec![0; 8]),
        ("codec d", numbers::<8>(&[2])),
        ("codec bytes", numbers::<8>(&[2])),
        ("ranges", [numbers::<8>(&[4]), floats(&[-1.0, -2.0, 2.0, 4.0])].concat()),
        ("code bytes", numbers::<8>(&[2])),
        ("residual", vec![1]),
        ("inverted", b"ilar".to_vec()),
        ("inverted lists", numbers::<8>(&[3])),
        ("inverted bytes", numbers::<8>(&[2])),
        ("sizes", b"sprs".to_vec()),
        ("size numbers", numbers::<8>(&[4])),
        ("size pairs", numbers::<8>(&[0, 1, 1, 2])),
        ("codes of 0", vec![0, 255]),
        ("ids of 0", numbers::<8>(&[2])),
        ("codes of 1", vec![127, 127, 128, 0]),
        ("ids of 1", numbers::<8>(&[0, 1])),
        ("map numbers", numbers::<8>(&[3])),
        ("map ids", numbers::<8>(&[100, 101, 1 << 40])),
    ]);
    all
}

fn bytes(fields: &Fields) -> Vec<u8> {
    fields.iter().flat_map(|(_, bytes)| bytes.clone()).collect()
}

fn with(name: &str, value: Vec<u8>) -> Vec<u8> {
    let mut fields = fields();
    fields.iter_mut().find(|(n, _)| *n == name).unwrap().1 = value;
    bytes(&fields)
}

fn opened(bytes: &[u8]) -> Result<(Vec<i64>, Vec<f32>, Lists)> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let index = IndexFile::open(file.path())?;
    let entries: Vec<u32> = (0..index.ids().len() as u32).collect();
    Ok((index.ids().to_vec(), index.vectors(&entries)?, index.lists(&entries)))
}

fn refused(bytes: &[u8], kind: Kind, expected: &str) {
    let error = opened(bytes).expect_err(expected);
    assert!(error.kind() == kind && error.to_string().contains(expected), "{expected}: {error}");
}

#[test]
fn fields_are_read_as_faiss_writes_them() {
    let (ids, vectors, lists) = opened(&bytes(&fields())).unwrap();
    assert_eq!(ids, [1 << 40, 100, 101]);
    assert_eq!((lists.of_rows, lists.centroids.len(), lists.nearest), (vec![0, 1, 1], 6, true));
    // Code c decodes to least + (c + 1/2) / 255 of the width, relative to the list's centroid.
    let expected = [0.5 / 127.5, 2.0 + 1.0 / 127.5, 0.0, 1.0, 1.0 / 127.5, -1.0 + 1.0 / 127.5];
    assert!(vectors.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{vectors:?}");
}

#[test]
fn every_codec_is_read() {
    let halves = |bits: [u16; 2]| bits.map(u64::from).to_vec();
    for (kind, ranges, codes, bytes_each, expected) in [
        (2u64, vec![0.0, 255.0], vec![0u8, 9], 2u64, [0.5f32, 9.5]),
        (
            4,
            vec![],
            numbers::<2>(&halves([f16::from_f32(1.5).to_bits(), f16::from_f32(-3.0).to_bits()])),
            4,
            [1.5, -3.0],
        ),
        (5, vec![], vec![0, 255], 2, [0.0, 255.0]),
        (
            7,
            vec![],
            numbers::<2>(&halves([bf16::from_f32(1.5).to_bits(), bf16::from_f32(-3.0).to_bits()])),
            4,
            [1.5, -3.0],
        ),
        (8, vec![], vec![0, 255], 2, [-128.0, 127.0]),
    ] {
        let mut fields = fields();
        let mut set = |name: &str, value: Vec<u8>| fields.iter_mut().find(|(n, _)| *n == name).unwrap().1 = value;
        set("type", numbers::<4>(&[kind]));
        set("ranges", [numbers::<8>(&[ranges.len() as u64]), floats(&ranges)].concat());
        for name in ["codec bytes", "code bytes", "inverted bytes"] {
            set(name, numbers::<8>(&[bytes_each]));
        }
        set("residual", vec![0]);
        set("codes of 0", codes.clone());
        set("codes of 1", [codes.clone(), codes].concat());
        let (_, vectors, _) = opened(&bytes(&fields)).unwrap();
        assert_eq!(vectors, [expected; 3].concat(), "type {kind}");
    }
}

#[test]
fn unsupported_parts_are_rejected_by_name() {
    for fourcc in [b"IwPQ", b"IxHe", b"IHNf", b"IxFI", b"IxPT", b"IwFd", b"IvFl", b"IxM2", b"\x93NUM"] {
        let name = fourcc.escape_ascii().to_string();
        refused(
            &with("index", fourcc.to_vec()),
            Kind::Unsupported,
            &format!("index of kind `{name}`, supported are IwFl"),
        );
        if fourcc != b"IxM2" {
            refused(&with("map", fourcc.to_vec()), Kind::Unsupported, &name);
        }
    }
    for (field, value, expected) in [
        ("coarse", b"IHNf".to_vec(), "coarse quantizer of kind `IHNf`, supported are IxFI"),
        ("inverted", b"ilod".to_vec(), "inverted lists of kind `ilod`, supported are ilar"),
        ("sizes", b"flat".to_vec(), "sizes of the lists of kind `flat`"),
        ("metric", numbers::<4>(&[23]), "metric 23: supported are inner product (0) and L2 (1)"),
        ("trained", vec![0], "not trained"),
        ("type", numbers::<4>(&[6]), "scalar quantizer of type 6"),
    ] {
        refused(&with(field, value), Kind::Unsupported, expected);
    }
    let mut fields = fields();
    fields.iter_mut().find(|(n, _)| *n == "metric").unwrap().1 = numbers::<4>(&[1]);
    let mut codes = |of_0: [u8; 2], of_1: [u8; 4]| {
        fields.iter_mut().find(|(n, _)| *n == "codes of 0").unwrap().1 = of_0.to_vec();
        fields.iter_mut().find(|(n, _)| *n == "codes of 1").unwrap().1 = of_1.to_vec();
        bytes(&fields)
    };
    // Around (1, 0) and (0, 1): two vectors of norm 1, and one that is clipped at an end of its range.
    let clipped = codes([127, 127], [127, 127, 0, 255]);
    assert!(opened(&clipped).is_ok());
    refused(
        &codes([0, 127], [127, 127, 0, 255]),
        Kind::Unsupported,
        "2 of 3 codes are at a limit of the quantizer's range",
    );
    refused(
        &codes([127, 127], [127, 127, 200, 200]),
        Kind::Unsupported,
        "the metric of the index is L2 and the norms of its vectors range from",
    );
}

#[test]
fn contradictory_fields_are_rejected() {
    for (field, value, expected) in [
        ("d", numbers::<4>(&[0]), "vectors of 0 dimensions"),
        ("d", numbers::<4>(&[u64::MAX]), "vectors of -1 dimensions"),
        ("d", numbers::<4>(&[8193]), "expected 1 to 8192"),
        ("n", numbers::<8>(&[2]), "the lists have 3 vectors, expected at most 2"),
        ("trained", vec![2], "trained: got 2"),
        ("lists", numbers::<8>(&[0]), "0 lists"),
        ("lists", numbers::<8>(&[u64::MAX]), "18446744073709551615 lists, expected 1 to"),
        ("lists", numbers::<8>(&[4]), "expected 4 of 2"),
        ("coarse d", numbers::<4>(&[3]), "3 centroids of 3 dimensions"),
        ("centroid numbers", numbers::<8>(&[u64::MAX]), "centroids take 18446744073709551615 × 4 bytes"),
        ("centroid numbers", numbers::<8>(&[1 << 61]), "centroids take 2305843009213693952 × 4 bytes"),
        ("centroids", floats(&[0.0, 0.0, 0.0, f32::NAN, 0.0, 0.0]), "centroid 1 holds"),
        ("direct map", vec![3], "direct map of kind 3"),
        ("codec d", numbers::<8>(&[3]), "[3, 2, 2], expected [2, 2, 2]"),
        ("code bytes", numbers::<8>(&[8]), "[2, 2, 8]"),
        ("type", numbers::<4>(&[2]), "4 numbers of ranges, expected 2"),
        ("residual", vec![7], "by residual: got 7"),
        ("inverted lists", numbers::<8>(&[2]), "2 lists of 2 bytes per code, expected 3 lists of 2"),
        ("sizes", b"full".to_vec(), "sizes of 4 lists, expected 3"),
        ("size pairs", numbers::<8>(&[1, 2, 0, 1]), "size of list 0, expected that of list 2 to 2"),
        ("size pairs", numbers::<8>(&[0, 1, 3, 2]), "size of list 3"),
        ("size pairs", numbers::<8>(&[0, u64::MAX, 1, 2]), "codes of list 0 take 18446744073709551615 × 2"),
        ("map ids", numbers::<8>(&[100, 101]), "ids of the map take 3 × 8 bytes, the file has 16 more"),
        ("ids of 0", numbers::<8>(&[3]), "id 3 is outside of the map of 3 ids"),
        ("ids of 0", numbers::<8>(&[u64::MAX]), "id -1 is outside of the map of 3 ids"),
        ("ranges", [numbers::<8>(&[4]), floats(&[f32::INFINITY; 4])].concat(), "is not finite"),
        ("map ids", numbers::<8>(&[100, 101, 102, 103]), "8 bytes after the index"),
    ] {
        refused(&with(field, value), Kind::Corrupt, expected);
    }
    refused(&with("map ids", numbers::<8>(&[100, 101, 1 << 63])), Kind::Invalid, "id -9223372036854775808");
}

#[test]
fn files_truncated_at_any_byte_are_corrupt() {
    let golden = include_bytes!("../../../../../tests/golden/faiss/sparse_direct.index");
    for whole in [&bytes(&fields())[..], golden] {
        assert!(opened(whole).is_ok());
        for cut in 0..whole.len() {
            let error = Inverted::parse(&whole[..cut]).expect_err("a part of a file");
            assert_eq!(error.kind(), Kind::Corrupt, "cut at {cut}: {error}");
            assert!(error.to_string().contains("byte "), "{error}");
        }
    }
}

#[test]
fn a_flipped_bit_is_an_error_or_another_file() {
    let whole = bytes(&fields());
    for at in 0..8 * whole.len() {
        let mut broken = whole.clone();
        broken[at / 8] ^= 1 << (at % 8);
        match opened(&broken) {
            Ok((ids, vectors, lists)) => assert_eq!((ids.len(), vectors.len(), lists.of_rows.len()), (3, 6, 3)),
            Err(e) => assert!(matches!(e.kind(), Kind::Corrupt | Kind::Unsupported | Kind::Invalid), "{e}"),
        }
    }
}
