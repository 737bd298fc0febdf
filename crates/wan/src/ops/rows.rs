//! Work on rows: the parallel driver, sums over rows, and an exponential that becomes vector code.
//!
//! Every row is computed by the same instructions wherever it lies, and sums over rows are taken in blocks of a fixed
//! size in a fixed order. So a row's result depends neither on the other rows nor on the number of threads.

use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows of one task.
const BLOCK: usize = 64;

/// Elements that are zeroed before they are written: few enough to stay in the nearest cache.
const STRIP: usize = 4096;

/// Partial sums of one row, added up in lanes.
const LANES: usize = 16;

/// Runs `f` with the widest vector instructions of the processor; what it calls must be `#[inline(always)]`.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Computes `rows` rows of `width` elements in parallel; `body` is given the rows and writes them.
pub fn map_rows(rows: usize, width: usize, body: impl Fn(Range<usize>, &mut [f32]) + Sync) -> Vec<f32> {
    map_and_sum_rows(rows, width, [1, 0], |range, out, _| body(range, out)).0
}

/// As [`map_rows`], and also sums over each group of consecutive rows.
///
/// `[group, sum_width]`: rows of a group, elements of its sum. `body` adds what its rows give to a slice
/// [1, sum_width] that starts at zero, or [rows, sum_width] if each row is its own group (`group == 1`). Returns the rows and the
/// sums [groups, sum_width].
pub fn map_and_sum_rows(
    rows: usize,
    width: usize,
    [group, sum_width]: [usize; 2],
    body: impl Fn(Range<usize>, &mut [f32], &mut [f32]) + Sync,
) -> (Vec<f32>, Vec<f32>) {
    let strip = (STRIP / width.max(1)).clamp(1, BLOCK);
    let strips = |block: Range<usize>, out: &mut [MaybeUninit<f32>], sums: &mut [f32]| {
        for first in block.clone().step_by(strip) {
            let rows = first..(first + strip).min(block.end);
            let done = first - block.start;
            let place = if group == 1 { done * sum_width..(done + rows.len()) * sum_width } else { 0..sum_width };
            let out = zeroed(&mut out[done * width..(done + rows.len()) * width]);
            body(rows, out, &mut sums[place]);
        }
    };
    // SAFETY: the strips cover the block, and each is zeroed.
    unsafe { map_blocks(rows, width, [group, sum_width], strips) }
}

/// As [`map_and_sum_rows`], with whole blocks of up to 64 rows that `body` initialises itself.
///
/// # Safety
/// `body` initialises all of its output.
pub unsafe fn map_blocks(
    rows: usize,
    width: usize,
    [group, sum_width]: [usize; 2],
    body: impl Fn(Range<usize>, &mut [MaybeUninit<f32>], &mut [f32]) + Sync,
) -> (Vec<f32>, Vec<f32>) {
    let blocks = blocks(rows, group);
    let sum_rows = |block: &Range<usize>| if group == 1 { block.len() } else { 1 };
    let mut out = Vec::with_capacity(rows * width);
    let mut partial = vec![0.0; blocks.iter().map(sum_rows).sum::<usize>() * sum_width];
    let (mut out_left, mut sums_left) = (&mut out.spare_capacity_mut()[..rows * width], partial.as_mut_slice());
    let mut tasks = Vec::with_capacity(blocks.len());
    for block in &blocks {
        let (here, rest) = out_left.split_at_mut(block.len() * width);
        let (sums, sums_rest) = sums_left.split_at_mut(sum_rows(block) * sum_width);
        (out_left, sums_left) = (rest, sums_rest);
        tasks.push((block.clone(), here, sums));
    }
    tasks.into_par_iter().for_each(|(block, out, sums)| body(block, out, sums));
    // SAFETY: the blocks cover all rows, and each task has initialised its part by contract.
    unsafe { out.set_len(rows * width) };
    if group == 1 { (out, partial) } else { (out, add_partials(&partial, rows, group, sum_width)) }
}

/// Consecutive blocks of rows that do not cross a group, unless each row is a group.
fn blocks(rows: usize, group: usize) -> Vec<Range<usize>> {
    let group = if group == 1 { rows } else { group };
    let within =
        |first: usize| (first..(first + group).min(rows)).step_by(BLOCK).map(move |at| at..(at + BLOCK).min(first + group).min(rows));
    (0..rows).step_by(group.max(1)).flat_map(within).collect()
}

fn add_partials(partial: &[f32], rows: usize, group: usize, width: usize) -> Vec<f32> {
    if width == 0 {
        return Vec::new();
    }
    let per_group = group.min(rows).div_ceil(BLOCK);
    let mut sums = Vec::with_capacity(rows.div_ceil(group) * width);
    for partials in partial.chunks(per_group * width) {
        let (first, others) = partials.split_at(width);
        let start = sums.len();
        sums.extend_from_slice(first);
        others.chunks_exact(width).for_each(|other| add_to(&mut sums[start..], other));
    }
    sums
}

/// Zeroes what the task is about to write: cheap, because it stays in the cache.
pub fn zeroed(out: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    out.fill(MaybeUninit::new(0.0));
    // SAFETY: every element has just been written.
    unsafe { &mut *(std::ptr::from_mut(out) as *mut [f32]) }
}

/// sum += term
#[inline(always)]
pub fn add_to(sum: &mut [f32], term: &[f32]) {
    for (sum, term) in sum.iter_mut().zip(term) {
        *sum += term;
    }
}

/// Sum of f(x) over a row.
#[inline(always)]
pub fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    sum_2(x, x, |x, _| f(x))
}

/// Sum of f(x, y) over two rows of the same length.
#[inline(always)]
pub fn sum_2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (x, y) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = x.remainder().iter().zip(y.remainder());
    for (x, y) in x.zip(y) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(rest) {
        *lane += f(*x, *y);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Largest element of a row.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = if x[i] > lanes[i] { x[i] } else { lanes[i] };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

/// e^x to about 1 ulp, for |x| beyond 87 the value at 87; without branches, so that the loops around it become vector code.
///
/// ```text
/// x = n ln 2 + r,   e^x = 2^n e^r
/// ```
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const LN2_HIGH: f32 = 0.693_359_375;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 87.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    // The minimax polynomial of Cephes' expf.
    let p = 1.987_569_15e-4 * r + 1.398_199_95e-3;
    let p = p * r + 8.333_451_9e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_55e-1;
    let p = p * r + 5.000_000_1e-1;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23)); // 2^n
    (p * r * r + r + 1.0) * power
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
