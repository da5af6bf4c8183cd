//! Compares emulated tiles, and hardware tiles if present, with sums written out; and checks that the emulation rejects invalid
//! use.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

const FULL: Shape = Shape { rows: ROWS, row_bytes: ROW_BYTES };

/// Runs `check` on every implementation of tiles that this machine has.
fn each(check: impl Fn(&mut dyn FnMut(Shape, Shape, Shape, Act<'_>))) {
    check(&mut |c, a, b, act| act.run(&mut Emulated::new(false), (c, a, b)));
    if are_there() && permit() {
        // SAFETY: tiles exist, and this thread has no others.
        check(&mut |c, a, b, act| act.run(&mut unsafe { Instructions::new() }, (c, a, b)));
    }
}

/// Tile product: bytes of the factors, and the output, which holds the initial sums.
struct Act<'a> {
    pairs: bool,
    left: &'a [u8],
    right: &'a [u8],
    sums: &'a mut [u8],
}

impl Act<'_> {
    fn run<T: Tiles>(self, tiles: &mut T, (c, a, b): (Shape, Shape, Shape)) {
        tiles.configure(&[c, a, b, FULL, FULL, FULL, FULL, FULL]);
        tiles.load::<0>(self.sums, c.row_bytes);
        tiles.load::<1>(self.left, a.row_bytes);
        tiles.load::<2>(self.right, b.row_bytes);
        match self.pairs {
            true => tiles.add_pairs::<0, 1, 2>(),
            false => tiles.add_bytes::<0, 1, 2>(),
        }
        tiles.store::<0>(self.sums, c.row_bytes);
    }
}

fn bytes(count: usize, seed: usize) -> Vec<u8> {
    (0..count).map(|n| ((n * 193 + seed * 71 + 5) % 251) as u8).collect()
}

#[test]
fn products_of_bytes_are_signed_by_unsigned_for_every_shape() {
    each(|run| {
        for (rows, depth, columns) in [(1, 1, 1), (8, 16, 16), (16, 16, 16), (3, 7, 5), (16, 1, 2), (7, 15, 16)] {
            let shapes = [(rows, columns), (rows, depth), (depth, columns)]
                .map(|(rows, words)| Shape { rows, row_bytes: words * 4 });
            let (left, right) = (bytes(rows * depth * 4, 1), bytes(depth * columns * 4, 2));
            let mut sums: Vec<u8> = (0..rows * columns).flat_map(|n| (n as i32 * 1000 - 5000).to_le_bytes()).collect();
            let started = sums.clone();
            run(shapes[0], shapes[1], shapes[2], Act { pairs: false, left: &left, right: &right, sums: &mut sums });
            for m in 0..rows {
                for n in 0..columns {
                    let number =
                        |bytes: &[u8]| i32::from_le_bytes(std::array::from_fn(|i| bytes[(m * columns + n) * 4 + i]));
                    let product = |k: usize| {
                        let (x, y) = (left[m * depth * 4 + k], right[(k / 4 * columns + n) * 4 + k % 4]);
                        i32::from(x as i8) * i32::from(y)
                    };
                    let want = number(&started) + (0..depth * 4).map(product).sum::<i32>();
                    assert_eq!(number(&sums), want, "{rows} x {depth} x {columns}: [{m}, {n}]");
                }
            }
        }
    });
}

/// Computes one number of a product in pairs, over up to 16 pairs.
fn pairs_of(run: &mut dyn FnMut(Shape, Shape, Shape, Act<'_>), start: f32, left: &[f32], right: &[f32]) -> f32 {
    let narrow =
        |x: &[f32]| x.iter().flat_map(|x| half::bf16::from_f32(*x).to_bits().to_le_bytes()).collect::<Vec<u8>>();
    let (one, depth) = (Shape { rows: 1, row_bytes: 4 }, left.len() / 2);
    let mut sums = start.to_le_bytes();
    let act = Act { pairs: true, left: &narrow(left), right: &narrow(right), sums: &mut sums };
    run(one, Shape { rows: 1, row_bytes: 4 * depth }, Shape { rows: depth, row_bytes: 4 }, act);
    f32::from_le_bytes(sums)
}

#[test]
fn products_of_pairs_sum_two_chains_that_join_at_the_end() {
    const TINY: f32 = 1.0 / (1u64 << 24) as f32;
    each(|run| {
        assert_eq!(pairs_of(run, 0.5, &[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]), 70.5);
        // Half a unit in the last place of 1: lost if added to 1 alone, preserved if two of them are added first.
        assert_eq!(pairs_of(run, 1.0, &[1.0, 1.0], &[TINY, TINY]), 1.0 + 2.0 * TINY);
        assert_eq!(pairs_of(run, 0.0, &[1.0, 0.0, 1.0, 0.0], &[1.0, 0.0, TINY, 0.0]), 1.0);
        assert_eq!(pairs_of(run, 0.0, &[1.0, 1.0, 0.0, 1.0], &[1.0, TINY, 0.0, TINY]), 1.0 + 2.0 * TINY);
        // Ties round to even.
        assert_eq!(pairs_of(run, 1.0 + 2.0 * TINY, &[1.0, 0.0], &[TINY, 0.0]), 1.0 + 4.0 * TINY);
        assert!(pairs_of(run, 0.0, &[f32::INFINITY, 0.0], &[0.0, 0.0]).is_nan());
        assert_eq!(pairs_of(run, 0.0, &[f32::MAX, 0.0], &[f32::MAX, 0.0]), f32::INFINITY);
    });
}

#[test]
fn numbers_too_small_for_their_exponent_are_0() {
    let least = f32::MIN_POSITIVE;
    each(|run| {
        assert_eq!(pairs_of(run, 0.0, &[least / 2.0, 0.0], &[1e30, 0.0]), 0.0, "of a factor");
        assert_eq!(pairs_of(run, 0.0, &[least, 0.0], &[0.5, 0.0]), 0.0, "of a product");
        assert_eq!(pairs_of(run, least / 2.0, &[0.0, 0.0], &[1.0, 0.0]), 0.0, "of a sum");
        assert_eq!(pairs_of(run, 0.0, &[least, 0.0], &[1.0, 0.0]), least);
    });
}

#[test]
fn illegal_instructions_are_rejected() {
    let refused = |act: &dyn Fn(&mut Emulated)| {
        let mut tiles = Emulated::new(false);
        catch_unwind(AssertUnwindSafe(|| act(&mut tiles))).is_err()
    };
    let shape = |rows: usize, row_bytes: usize| Shape { rows, row_bytes };
    let with = |tiles: &mut Emulated, first: Shape| {
        tiles.configure(&[first, FULL, FULL, FULL, FULL, FULL, FULL, Shape::default()]);
    };
    assert!(refused(&|tiles| tiles.zero::<0>()), "tiles before they are configured");
    assert!(refused(&|tiles| with(tiles, shape(17, 64))));
    assert!(refused(&|tiles| with(tiles, shape(16, 68))));
    assert!(refused(&|tiles| {
        with(tiles, FULL);
        tiles.zero::<7>();
    }));
    assert!(refused(&|tiles| {
        with(tiles, FULL);
        tiles.add_pairs::<0, 1, 1>();
    }));
    assert!(refused(&|tiles| {
        with(tiles, shape(8, 64));
        tiles.add_pairs::<0, 1, 2>();
    }));
    assert!(refused(&|tiles| {
        with(tiles, shape(16, 32));
        tiles.add_bytes::<1, 0, 2>();
    }));
    assert!(!refused(&|tiles| {
        with(tiles, FULL);
        tiles.add_bytes::<0, 1, 2>();
    }));
}

#[test]
fn rows_beyond_the_input_are_rejected() {
    let refused = |act: &dyn Fn(&mut Emulated)| {
        let mut tiles = Emulated::new(false);
        tiles.configure(&[Shape { rows: 3, row_bytes: 8 }; TILES]);
        catch_unwind(AssertUnwindSafe(|| act(&mut tiles))).is_err()
    };
    assert!(!refused(&|tiles| tiles.load::<0>(&[0; 28], 10)));
    assert!(refused(&|tiles| tiles.load::<0>(&[0; 27], 10)));
    assert!(!refused(&|tiles| tiles.load::<0>(&[0; 8], 0)));
    assert!(!refused(&|tiles| tiles.store::<0>(&mut [0; 28], 10)));
    assert!(refused(&|tiles| tiles.store::<0>(&mut [0; 27], 10)));
}
