//! Listed keys that are not valid paths: `a//b`, `..`, control characters.
//!
//! Buckets allow such keys, but `object_store` rejects a complete page of a listing because of one of them. Invalid
//! keys are replaced in the page, so that valid objects are found and invalid keys can be counted.

use hyper::body::Bytes;
use object_store::path::Path as Key;

/// Replacement for each invalid key in a listing.
pub(super) const STRAY: &str = ".stray";
/// XML elements of an object and its key in a listing, first of S3 and Google, then of Azure.
const ELEMENTS: [(&str, &str); 2] = [("<Contents>", "Key"), ("<Blob>", "Name")];

/// Returns the page of a listing with each invalid key replaced by [`STRAY`].
pub(super) fn without_strays(page: Bytes) -> Bytes {
    let Ok(text) = std::str::from_utf8(&page) else { return page };
    let Some((entry, name)) = ELEMENTS.into_iter().find(|(entry, _)| text.contains(entry)) else { return page };
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let stray = |piece: &str| {
        let from = piece.find(&open)? + open.len();
        let to = from + piece[from..].find(&close)?;
        is_stray(&unescaped(&piece[from..to])).then_some(from..to)
    };
    let mut pieces = text.split(entry);
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        out.push_str(entry);
        match stray(piece) {
            Some(key) => {
                [&piece[..key.start], STRAY, &piece[key.end..]].into_iter().for_each(|part| out.push_str(part))
            }
            None => out.push_str(piece),
        }
    }
    out.into()
}

/// Returns true for a key that `object_store` rejects or changes (a leading `/`). A trailing `/` marks a folder and is valid.
fn is_stray(key: &str) -> bool {
    Key::parse(key).map_or(true, |parsed| parsed.as_ref() != key.strip_suffix('/').unwrap_or(key))
}

/// Returns the text of an element with its XML references resolved.
fn unescaped(text: &str) -> String {
    let mut pieces = text.split('&');
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (reference, rest) = piece.split_once(';').unwrap_or((piece, ""));
        let number = reference.strip_prefix('#').and_then(|digits| match digits.strip_prefix('x') {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => digits.parse().ok(),
        });
        let named = || match reference {
            "lt" => '<',
            "gt" => '>',
            "quot" => '"',
            "apos" => '\'',
            _ => '&',
        };
        // A reference to an invalid character makes the key invalid, as a control character does.
        out.push(number.map_or_else(named, |number| char::from_u32(number).unwrap_or('\0')));
        out.push_str(rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(keys: &[&str]) -> String {
        let entry = |key: &&str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
        format!(
            "<ListBucketResult><Prefix>b/</Prefix>{}</ListBucketResult>",
            keys.iter().map(entry).collect::<String>()
        )
    }

    #[test]
    fn renames_keys_that_no_path_can_have() {
        let strays = ["b//x", "b/../x", "b/./x", "/b/x", "b/&#x1;x", "b/&#10;", "b/\u{7f}", "b/x//"];
        for stray in strays {
            let seen = without_strays(page(&["b/1", stray, "b/a &amp; b/"]).into());
            assert_eq!(seen, page(&["b/1", STRAY, "b/a &amp; b/"]), "{stray}");
        }
        let azure = "<Blobs><Blob><Name>b//x</Name></Blob><Blob><Name>b/y</Name></Blob></Blobs>";
        assert_eq!(without_strays(azure.into()), azure.replace("b//x", STRAY));
        assert_eq!(without_strays(Bytes::from_static(&[0xff, 1])), [0xff, 1][..]);
    }

    proptest! {
        #[test]
        fn every_key_left_is_one_of_a_path(keys in prop::collection::vec("[a-c./&;#x01\u{1}]{0,8}", 0..6)) {
            let keys: Vec<String> = keys.iter().map(|key| key.replace('&', "&amp;")).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let seen = without_strays(page(&keys).into());
            let seen = std::str::from_utf8(&seen).unwrap_or_default();
            for (n, piece) in seen.split("<Key>").skip(1).enumerate() {
                let key = piece.split("</Key>").next().unwrap_or_default();
                prop_assert!(Key::parse(unescaped(key)).is_ok(), "{key:?}");
                prop_assert!(key == STRAY || key == keys[n]);
            }
        }
    }
}
