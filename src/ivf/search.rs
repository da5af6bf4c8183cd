//! Searching: probe, scan, probe on while that still pays, or look at every item.
//!
//! Sketch for one query (D = 128, C = 4096): centroids are 0.5 MB of int8 and stay in the second-level cache; P lists of N/C
//! items are `P N/C D` bytes read once from memory (P = 32, N = 1M: 1 MB, 40 µs at 25 GB/s) and as many multiply-adds,
//! 64 an instruction. A filter costs `words / 8` bytes a plane and list before that, and saves the blocks without survivors.
//!
//! A block is read whole for a single survivor. Where survivors are few and rows that rescore are kept, those rows are read
//! instead: a tenth of the items touches four fifths of the blocks, 1 KB a survivor, while a row in half precision is 256 B.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::quantize::Quantized;
use super::view::{Index, WideRows};
use crate::device::cpu::kernels::{BLOCK, Blocks, Pick, Staging};
use crate::topk::{self, Selector, unkey};
use crate::units::{ListId, Slot};

/// Lists whose words survive a filter: fills the words of a list, one bit an item.
pub type Words<'a> = &'a mut dyn FnMut(ListId, &mut [u64]);

/// After the first P lists, as many again are probed at a time, over this.
const CHUNKS_PER_PROBES: usize = 2;
/// Probing on ends when a chunk of lists brought fewer new candidates than this share of K0.
const YIELD_SHARE_MIN: f64 = 0.005;
/// Where probes were measured, the same as a share of what the recall lets go.
const MISSED_SHARE_MIN: f64 = 0.25;
/// A filter goes against the order of the lists where fewer than this share of the survivors that were expected were found.
const EXPECTED_SHARE_MIN: f64 = 0.5;
/// Below this share of passing items every list is scanned: their words cost less than a wrong guess of the lists.
const SCAN_ALL_PASS_RATE: f64 = 0.03;
/// What a byte of scattered rows costs beside a byte of blocks, which are read forwards.
const ROW_COST: u64 = 2;
/// Survivors that are collected before their rows are scored, so that the memory always has some to bring.
const ROWS_AT_ONCE: usize = 1024;
/// The same for blocks that hold survivors.
const PICKS_AT_ONCE: usize = 512;

/// How many lists a search looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probing {
    /// Lists, P; without a filter exactly these.
    pub probes: usize,
    /// Most lists that a filtered search may go on to.
    pub probes_max: usize,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// The recall that `probes` lists with survivors were measured to reach at this pass rate, where they were.
    pub recall: Option<f64>,
}

impl Probing {
    /// So many lists, of which nothing was measured, and at most these with a filter that lets all pass.
    pub fn of(probes: usize, probes_max: usize) -> Self {
        Probing { probes, probes_max, pass_rate: 1.0, recall: None }
    }
}

impl Probing {
    /// About how many of so many lists a search with words looks at.
    pub fn lists(&self, lists: usize) -> usize {
        let probes = self.probes.clamp(1, lists);
        let most = self.probes_max.clamp(probes, lists);
        match self.recall {
            Some(_) => probes,
            None if most == lists && self.pass_rate <= SCAN_ALL_PASS_RATE => lists,
            None => self.first(probes, most),
        }
    }

    /// As many lists as would hold the survivors of `probes` whole ones is where probing on begins to be judged.
    fn first(&self, probes: usize, most: usize) -> usize {
        ((probes as f64 / self.pass_rate.max(1e-6).sqrt()) as usize).clamp(probes, most)
    }
}

/// What a search did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Lists that were looked at.
    pub lists: u64,
    /// Items of these lists.
    pub items: u64,
    /// Items that passed the filter words and were scored.
    pub survivors: u64,
    /// Bytes of codes, scales and words that were read.
    pub bytes: u64,
    /// Time that scoring and ordering the lists took.
    pub probe_time: Duration,
}

impl Counters {
    /// Adds what another search did.
    pub fn add(&mut self, other: &Counters) {
        self.lists += other.lists;
        self.items += other.items;
        self.survivors += other.survivors;
        self.bytes += other.bytes;
        self.probe_time += other.probe_time;
    }
}

/// Memory of a search, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    query: Quantized,
    /// All lists, best first as far as they were asked for.
    lists: Vec<u64>,
    ordered: usize,
    scores: Vec<f32>,
    slots: Vec<u32>,
    words: Vec<u64>,
    /// Survivors whose rows are to be scored.
    pending: Vec<u32>,
    /// Blocks whose survivors are to be scored.
    picks: Vec<Pick>,
    products: Vec<f32>,
    /// Selects the lists of searches that know how many they want.
    coarse: Selector,
}

impl Index {
    /// Scores every centroid. Afterwards `scratch` hands out lists, best first.
    fn score_lists(&self, vector: &[f32], scratch: &mut Scratch) {
        self.quantize(vector, &mut scratch.query);
        let lists = self.lists();
        scratch.scores.resize(lists.next_multiple_of(BLOCK) + BLOCK, 0.0);
        scratch.slots.resize(lists.next_multiple_of(BLOCK) + BLOCK, 0);
        let mut staging = Staging { scores: &mut scratch.scores, slots: &mut scratch.slots, len: 0 };
        self.kernels.scan(&self.centroids(), &scratch.query.view(), f32::NEG_INFINITY, 0, &mut staging);
        let scores = &mut scratch.scores[..lists];
        scores.iter_mut().zip(&*self.penalties).for_each(|(score, penalty)| *score -= penalty);
        scratch.lists.clear();
        scratch.lists.extend(scores.iter().enumerate().map(|(list, &score)| topk::key(score, Slot(list as u32))));
        scratch.ordered = 0;
    }

    /// The P best lists of a vector, best first.
    pub fn probe<'a>(
        &self,
        vector: &[f32],
        probes: usize,
        scratch: &'a mut Scratch,
    ) -> impl Iterator<Item = (ListId, f32)> + 'a {
        self.score_lists(vector, scratch);
        scratch.order(probes);
        scratch.lists[..scratch.ordered].iter().map(|&key| {
            let (score, list) = unkey(key);
            (ListId(list.0), score)
        })
    }

    /// Searches the best lists of `vector` `[D]` for the candidates of `selector`, whose K0 the caller has set.
    ///
    /// Without `words` exactly `probes` lists are scanned. With them and a recall, `probes` lists that hold survivors are, and
    /// more where these held fewer than the pass rate lets expect. With words alone, all lists are where few items pass; else the
    /// search probes on beyond `probes` until K0 survivors were found and further lists hardly bring better ones. `probes_max`
    /// ends either.
    pub fn search(
        &self,
        vector: &[f32],
        probing: Probing,
        words: Option<Words<'_>>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let probes = probing.probes.clamp(1, self.lists());
        let probes_max = probing.probes_max.clamp(probes, self.lists());
        match words {
            None => self.search_best(vector, probes, selector, scratch),
            Some(words) => {
                let is_guess = probing.recall.is_none() && probing.pass_rate <= SCAN_ALL_PASS_RATE;
                let probing = Probing { probes, probes_max, ..probing };
                match probing.recall {
                    _ if probes_max == self.lists() && (probes == probes_max || is_guess) => {
                        self.search_every(vector, words, selector, scratch)
                    }
                    None => self.search_on(vector, probing, words, selector, k0, scratch),
                    Some(_) => self.search_for(vector, probing, words, selector, k0, scratch),
                }
            }
        }
    }

    /// Scans the best lists, all items of them.
    fn search_best(&self, vector: &[f32], probes: usize, selector: &mut Selector, scratch: &mut Scratch) -> Counters {
        let mut counters = Counters::default();
        if probes == self.lists() {
            self.quantize(vector, &mut scratch.query);
            for list in (0..self.lists() as u32).map(ListId) {
                self.scan_whole(list, None, &scratch.query, selector, &mut counters);
            }
            return counters;
        }
        let start = Instant::now();
        if self.penalties.is_empty() {
            self.quantize(vector, &mut scratch.query);
            scratch.coarse.reset(probes);
            scratch.coarse.scan(self.kernels, &self.centroids(), &scratch.query.view());
        } else {
            self.score_lists(vector, scratch);
            scratch.order(probes);
        }
        let Scratch { query, coarse, lists, .. } = scratch;
        let lists = if self.penalties.is_empty() { coarse.finish() } else { &lists[..probes] };
        counters.probe_time = start.elapsed();
        let list = |key: u64| ListId(unkey(key).1.0);
        for (n, &key) in lists.iter().enumerate() {
            let next = lists.get(n + 1).map(|&key| list(key));
            self.scan_whole(list(key), next, query, selector, &mut counters);
        }
        counters
    }

    /// Scans the survivors of every list.
    fn search_every(
        &self,
        vector: &[f32],
        words: Words<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
    ) -> Counters {
        let mut counters = Counters::default();
        self.quantize(vector, &mut scratch.query);
        for list in (0..self.lists() as u32).map(ListId) {
            self.scan_list(list, vector, words, selector, scratch, &mut counters);
        }
        self.score_pending(vector, selector, scratch);
        counters
    }

    /// Scans the survivors of the best lists, and goes on to further lists while that still pays.
    fn search_on(
        &self,
        vector: &[f32],
        probing: Probing,
        words: Words<'_>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let Probing { probes, probes_max, .. } = probing;
        let mut counters = Counters::default();
        let start = Instant::now();
        self.score_lists(vector, scratch);
        counters.probe_time = start.elapsed();
        let first = probing.first(probes, probes_max);
        let mut done = 0;
        let mut chunk = first;
        while done < probes_max {
            let end = (done + chunk).min(probes_max);
            scratch.order(end);
            let before = selector.accepted();
            self.scan_ordered(done..end, vector, words, selector, scratch, &mut counters);
            let gained = selector.accepted() - before;
            let enough = counters.survivors >= k0 as u64;
            if done > 0 && enough && (gained as f64) < YIELD_SHARE_MIN * k0 as f64 * chunk as f64 / probes as f64 {
                break;
            }
            done = end;
            if enough {
                // The threshold of the K0-th best so far is what later lists must beat.
                selector.shrink();
            }
            chunk = (first / CHUNKS_PER_PROBES).max(1);
        }
        counters
    }

    /// Scans as many lists that hold survivors as were measured to reach the recall, and goes on where the filter goes against
    /// the order of the lists, while that still brings what the recall would miss.
    fn search_for(
        &self,
        vector: &[f32],
        Probing { probes, probes_max, pass_rate, recall }: Probing,
        words: Words<'_>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let mut counters = Counters::default();
        let start = Instant::now();
        self.score_lists(vector, scratch);
        counters.probe_time = start.elapsed();
        let yield_min = (1.0 - recall.unwrap_or(1.0)) * MISSED_SHARE_MIN * k0 as f64;
        let (mut done, mut chunk) = (0, probes);
        loop {
            let (first, before) = (done == 0, selector.accepted());
            done = self.scan_holding(done..probes_max, chunk, vector, words, selector, scratch, &mut counters);
            let (gained, enough) = ((selector.accepted() - before) as f64, counters.survivors >= k0 as u64);
            let as_expected = counters.survivors as f64 >= pass_rate * EXPECTED_SHARE_MIN * counters.items as f64;
            let is_worth = first || gained >= yield_min * chunk as f64 / probes as f64;
            if done == probes_max || enough && (as_expected || !is_worth) {
                return counters;
            }
            if enough {
                selector.shrink();
            }
            chunk = (probes / CHUNKS_PER_PROBES).max(1);
        }
    }

    /// Scans lists of a range of the order until `count` of them held survivors. Returns where it ended.
    #[allow(clippy::too_many_arguments)]
    fn scan_holding(
        &self,
        range: Range<usize>,
        count: usize,
        vector: &[f32],
        words: Words<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
        counters: &mut Counters,
    ) -> usize {
        let (mut done, mut holding) = (range.start, 0);
        while holding < count && done < range.end {
            scratch.order(done + 1);
            let (list, before) = (ListId(unkey(scratch.lists[done]).1.0), counters.survivors);
            self.scan_list(list, vector, words, selector, scratch, counters);
            holding += usize::from(counters.survivors > before);
            done += 1;
        }
        self.score_pending(vector, selector, scratch);
        done
    }

    fn scan_ordered(
        &self,
        range: Range<usize>,
        vector: &[f32],
        words: Words<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
        counters: &mut Counters,
    ) {
        for n in range {
            let list = ListId(unkey(scratch.lists[n]).1.0);
            self.scan_list(list, vector, words, selector, scratch, counters);
        }
        self.score_pending(vector, selector, scratch);
    }

    /// The centroids as blocks that are scanned, a list a slot.
    pub(super) fn centroids(&self) -> Blocks<'_> {
        Blocks {
            codes: &self.centroid_codes,
            scales: &self.centroid_scales,
            groups: self.dimension.div_ceil(4),
            items: self.lists(),
            first_slot: 0,
            next: &[],
        }
    }

    /// Scans all items of a list, before those of the `next` one.
    pub(super) fn scan_whole(
        &self,
        list: ListId,
        next: Option<ListId>,
        query: &Quantized,
        selector: &mut Selector,
        counters: &mut Counters,
    ) {
        selector.scan(self.kernels, &self.blocks_before(list, next), &query.view());
        self.count_whole(list, counters);
    }

    /// Counts a list all items of which were scored.
    pub(super) fn count_whole(&self, list: ListId, counters: &mut Counters) {
        let length = self.list_lengths[list.index()] as usize;
        counters.lists += 1;
        counters.items += length as u64;
        counters.survivors += length as u64;
        counters.bytes += length.div_ceil(BLOCK) as u64 * self.block_bytes();
    }

    fn block_bytes(&self) -> u64 {
        (self.dimension.div_ceil(4) * 64 + BLOCK * 4) as u64
    }

    /// Leaves the survivors of a list's words to [`Index::score_pending`].
    fn scan_list(
        &self,
        list: ListId,
        vector: &[f32],
        words: Words<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
        counters: &mut Counters,
    ) {
        counters.lists += 1;
        counters.items += u64::from(self.list_lengths[list.index()]);
        let first = self.list_offsets[list.index()];
        let count = ((self.list_offsets[list.index() + 1] - first) as usize).div_ceil(64);
        scratch.words.resize(count, 0);
        words(list, &mut scratch.words);
        counters.bytes += count as u64 * 8;
        let survivors: u64 = scratch.words.iter().map(|w| u64::from(w.count_ones())).sum();
        if survivors == 0 {
            return;
        }
        counters.survivors += survivors;
        let blocks = scratch.words.iter().map(|&w| u64::from(blocks_of(w))).sum::<u64>() * self.block_bytes();
        let rows = survivors * self.row_bytes();
        if matches!(self.rows, WideRows::None) || rows * ROW_COST > blocks {
            counters.bytes += blocks;
            for (n, &word) in scratch.words.iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    let quarter = left.trailing_zeros() / BLOCK as u32;
                    let block = first / BLOCK as u32 + n as u32 * 4 + quarter;
                    scratch.picks.push(Pick { block, mask: (left >> (quarter * BLOCK as u32)) as u16 });
                    left &= !(u64::from(u16::MAX) << (quarter * BLOCK as u32));
                }
            }
        } else {
            counters.bytes += rows;
            for (n, &word) in scratch.words.iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    scratch.pending.push(first + n as u32 * 64 + left.trailing_zeros());
                    left &= left - 1;
                }
            }
        }
        if scratch.pending.len() >= ROWS_AT_ONCE || scratch.picks.len() >= PICKS_AT_ONCE {
            self.score_pending(vector, selector, scratch);
        }
    }

    /// Offers the survivors that were left to be scored, in their blocks or by their rows.
    fn score_pending(&self, vector: &[f32], selector: &mut Selector, scratch: &mut Scratch) {
        let Scratch { query, pending, picks, products, .. } = scratch;
        selector.scan_picks(self.kernels, &self.all_blocks(), picks, &query.view());
        picks.clear();
        products.resize(pending.len(), 0.0);
        self.products(vector, pending, products);
        products.iter().zip(&*pending).for_each(|(&score, &slot)| selector.push(score, Slot(slot)));
        pending.clear();
    }

    /// Offers the given slots, scored as [`Index::product`] does: the way of posting lists.
    pub fn search_slots(&self, vector: &[f32], slots: &[Slot], selector: &mut Selector) -> Counters {
        for slots in slots.chunks(ROWS_AT_ONCE) {
            let (mut numbers, mut products) = ([0u32; ROWS_AT_ONCE], [0f32; ROWS_AT_ONCE]);
            let (numbers, products) = (&mut numbers[..slots.len()], &mut products[..slots.len()]);
            numbers.iter_mut().zip(slots).for_each(|(number, slot)| *number = slot.0);
            self.products(vector, numbers, products);
            products.iter().zip(slots).for_each(|(&score, &slot)| selector.push(score, slot));
        }
        let (n, width) = (slots.len() as u64, self.row_bytes());
        Counters { items: n, survivors: n, bytes: n * width, ..Counters::default() }
    }

    /// Offers every item that `eligible` lets pass, scored as [`Index::product`] does: exact search.
    pub fn search_exact(
        &self,
        vector: &[f32],
        mut eligible: impl FnMut(Slot) -> bool,
        selector: &mut Selector,
    ) -> Counters {
        let mut counters = Counters { lists: self.lists() as u64, ..Counters::default() };
        for list in 0..self.lists() {
            let first = self.list_offsets[list];
            for slot in (first..first + self.list_lengths[list]).map(Slot) {
                counters.items += 1;
                if eligible(slot) {
                    counters.survivors += 1;
                    selector.push(self.product(vector, slot), slot);
                }
            }
        }
        counters.bytes = counters.survivors * self.row_bytes();
        counters
    }

    /// Bytes of the widest row that is kept of an item.
    pub fn row_bytes(&self) -> u64 {
        let width = match &self.rows {
            WideRows::None => 1,
            WideRows::Bf16(_) | WideRows::F16(_) => 2,
            WideRows::F32(_) => 4,
        };
        (self.dimension * width) as u64
    }
}

/// The blocks of 16 items that a word has bits in.
fn blocks_of(word: u64) -> u32 {
    const FIRSTS: u64 = 0x0001_0001_0001_0001;
    let halves = word | word >> 8;
    let quarters = halves | halves >> 4;
    let pairs = quarters | quarters >> 2;
    ((pairs | pairs >> 1) & FIRSTS).count_ones()
}

impl Scratch {
    /// Brings the first `count` lists into their order.
    fn order(&mut self, count: usize) {
        let count = count.min(self.lists.len());
        if count > self.ordered {
            let rest = &mut self.lists[self.ordered..];
            // As many again as there are: a search that probes on comes back for more.
            let more = (count - self.ordered).max(self.ordered).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable_by(more - 1, |a, b| b.cmp(a));
            }
            rest[..more].sort_unstable_by(|a, b| b.cmp(a));
            self.ordered += more;
        }
    }
}
