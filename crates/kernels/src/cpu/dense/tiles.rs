//! Products in tiles of AVX-512 registers: up to 14 rows and 32 columns, or up to 3 rows and 128 columns.
//!
//! The same loops serve both forms of factors. The forms differ in the multiply-add of 16 lanes, and in how two registers become
//! one of pairs.

/// Defines the function `product` for the instruction set of `$features`. `$multiply_add` adds the products of 16 lanes to their
/// sums; `$pairs` converts the sums of two registers to pairs, in order.
macro_rules! tiles {
    ($features:literal, $multiply_add:path, $pairs:path) => {
        /// Maximum number of rows of a tile: 28 of 32 registers hold sums.
        const ROWS_MAX: usize = 14;
        /// Up to this number of rows, [`WIDE`] registers of columns are multiplied at once, to have enough independent
        /// sums.
        const ROWS_FEW: usize = 3;
        const WIDE: usize = 8;

        /// A tile: `rows` rows from `row` on, columns from register `register` on.
        #[derive(Clone, Copy)]
        struct Place {
            row: usize,
            register: usize,
            stride: usize,
        }

        /// # Safety
        /// The CPU has the features; the slices are as long as `Kernels::product` checks.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
            // Results in pairs are written from two registers at once.
            let registers = match product.result {
                Form::Single => product.columns.div_ceil(LANES),
                Form::Pairs => product.columns.div_ceil(PANEL) * (PANEL / LANES),
            };
            let tiles = product.rows.div_ceil(ROWS_MAX);
            let mut row = 0;
            for tile in 0..tiles {
                // Tiles of nearly equal height, so that none has only a row or two.
                let rows = (product.rows - row).div_ceil(tiles - tile);
                let wides = if rows <= ROWS_FEW { registers / WIDE } else { 0 };
                let columns = wides + (registers - wides * WIDE).div_ceil(2);
                for n in 0..columns {
                    let n = if product.backwards { columns - 1 - n } else { n };
                    let register = WIDE * n.min(wides) + 2 * n.saturating_sub(wides);
                    let place = Place { row, register, stride };
                    // SAFETY: this function's `# Safety` conditions hold; the tile lies inside the result.
                    unsafe {
                        match registers - register {
                            _ if n < wides => wide(product, out.as_mut_ptr(), place, rows),
                            2.. => panel::<2>(product, out.as_mut_ptr(), place, rows),
                            _ => panel::<1>(product, out.as_mut_ptr(), place, rows),
                        }
                    }
                }
                row += rows;
            }
        }

        /// # Safety
        /// As [`tile`], for a tile of `rows` rows.
        #[target_feature(enable = $features)]
        unsafe fn wide(product: &Product<'_>, out: *mut f32, place: Place, rows: usize) {
            // SAFETY: this function's `# Safety` conditions hold.
            unsafe {
                match rows {
                    1 => tile::<1, WIDE>(product, out, place),
                    2 => tile::<2, WIDE>(product, out, place),
                    _ => tile::<3, WIDE>(product, out, place),
                }
            }
        }

        /// # Safety
        /// As [`tile`], for a tile of `rows` rows.
        #[target_feature(enable = $features)]
        unsafe fn panel<const V: usize>(product: &Product<'_>, out: *mut f32, place: Place, rows: usize) {
            // SAFETY: this function's `# Safety` conditions hold.
            unsafe {
                match rows {
                    1 => tile::<1, V>(product, out, place),
                    2 => tile::<2, V>(product, out, place),
                    3 => tile::<3, V>(product, out, place),
                    4 => tile::<4, V>(product, out, place),
                    5 => tile::<5, V>(product, out, place),
                    6 => tile::<6, V>(product, out, place),
                    7 => tile::<7, V>(product, out, place),
                    8 => tile::<8, V>(product, out, place),
                    9 => tile::<9, V>(product, out, place),
                    10 => tile::<10, V>(product, out, place),
                    11 => tile::<11, V>(product, out, place),
                    12 => tile::<12, V>(product, out, place),
                    13 => tile::<13, V>(product, out, place),
                    _ => tile::<14, V>(product, out, place),
                }
            }
        }

        /// Computes the sums of `M` rows and `V` registers of columns.
        ///
        /// # Safety
        /// As [`product`]; the rows and the first column of every register lie inside the result, or in its padding.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn tile<const M: usize, const V: usize>(product: &Product<'_>, out: *mut f32, place: Place) {
            let Place { row, register, stride } = place;
            let mut sums = [[_mm512_setzero_ps(); V]; M];
            if !product.bias.is_empty() {
                for v in 0..V {
                    let first = (register + v) * LANES;
                    if first < product.columns {
                        // SAFETY: a bias holds complete registers for all columns.
                        let bias = unsafe { _mm512_loadu_ps(product.bias.as_ptr().add(first)) };
                        sums.iter_mut().for_each(|sum| sum[v] = bias);
                    }
                }
            }
            for part in product.parts {
                let mut columns = [std::ptr::null::<f32>(); V];
                for (v, column) in columns.iter_mut().enumerate() {
                    let first = (register + v) * LANES;
                    let start = first / PANEL * part.weights.panel_stride + first % PANEL;
                    *column = part.weights.numbers.as_ptr().wrapping_add(start);
                }
                let rows = part.rows.as_ptr().wrapping_add(row * part.stride);
                for k in 0..part.depth {
                    let mut weights = [_mm512_setzero_ps(); V];
                    for v in 0..V {
                        // SAFETY: weights reach to the last register of the last row (`super::operands::reach`).
                        weights[v] = unsafe { _mm512_loadu_ps(columns[v].add(k * part.weights.row_stride)) };
                    }
                    for (m, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: all rows of a part hold `depth` numbers.
                        let x = _mm512_set1_ps(unsafe { *rows.add(m * part.stride + k) });
                        for v in 0..V {
                            sum[v] = $multiply_add(sum[v], x, weights[v]);
                        }
                    }
                }
            }
            for (m, sum) in sums.iter_mut().enumerate() {
                if product.relu {
                    // `max` returns its second operand if one is NaN, so NaN sums stay NaN.
                    sum.iter_mut().for_each(|sum| *sum = _mm512_max_ps(_mm512_setzero_ps(), *sum));
                }
                let first = register * LANES;
                if product.result == Form::Pairs {
                    for (n, both) in sum.as_chunks::<2>().0.iter().enumerate() {
                        // SAFETY: a row's space holds complete panels of columns in pairs.
                        unsafe {
                            let to = out.add((row + m) * stride + first / 2 + n * LANES);
                            _mm512_storeu_ps(to, $pairs(both[0], both[1]));
                        }
                    }
                    continue;
                }
                for (v, &sum) in sum.iter().enumerate() {
                    let first = first + v * LANES;
                    let mask = (u32::MAX >> (32 - (product.columns - first).min(LANES))) as u16;
                    // SAFETY: the masked numbers lie inside the result.
                    unsafe { _mm512_mask_storeu_ps(out.add((row + m) * stride + first), mask, sum) };
                }
            }
        }
    };
}

pub(super) use tiles;
