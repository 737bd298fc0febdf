//! Matrix products for the layers: one kernel, every operand by its strides.
//!
//! ```text
//! out[i, j] = start[i, j] + sum_k lhs[i, k] rhs[k, j]
//! ```
//!
//! Each element is one chain of fused multiply-adds in the order of k. So a row's bits depend neither on the number of rows, nor
//! on its place among them, nor on threads, nor on the width of the vectors; the engine's own product promises none
//! of this. The right operand is read in panels of [`PANEL`] columns, either packed ([`Packed`]) or in place.

use super::rows::vectorized;
use burn::tensor::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Columns of a panel of the right operand.
pub const PANEL: usize = 32;

/// Rows of one task: they are multiplied with all panels while they stay in the cache.
pub const TASK_ROWS: usize = 48;

/// Steps of k after which the sums go through memory, so that a panel stays in the cache.
const DEPTH: usize = 1024;

/// Products below this many multiply-adds are not worth a second thread.
const PARALLEL: usize = 1 << 18;

/// Left operand: element (i, k) is `data[i * row + k * column]`.
#[derive(Clone, Copy)]
pub struct Lhs<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub column: usize,
}

impl<'a> Lhs<'a> {
    /// A matrix [.., width] in row-major order.
    pub fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, column: 1 }
    }

    /// The transpose of a matrix [.., width] in row-major order.
    pub fn transposed(data: &'a [f32], width: usize) -> Self {
        Self { data, row: 1, column: width }
    }
}

/// Right operand: element (k, j) is `data[j / PANEL * panel + k * row + j % PANEL]`; whole panels can be read.
#[derive(Clone, Copy)]
pub struct Rhs<'a> {
    data: &'a [f32],
    panel: usize,
    row: usize,
}

impl<'a> Rhs<'a> {
    /// A matrix [.., width] in row-major order, read in place.
    ///
    /// # Panics
    /// If its rows are not whole panels.
    pub fn rows(data: &'a [f32], width: usize, columns: usize) -> Self {
        assert_eq!(columns % PANEL, 0, "whole panels");
        Self { data, panel: PANEL, row: width }
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "read through a pointer to floats")] [f32; 16]);

/// What a right operand is packed from.
pub trait Value: Copy + Sync {
    /// The same number.
    fn wide(self) -> f32;
}

impl Value for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Value for bf16 {
    /// A bf16 is the upper half of an f32.
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// A right operand [depth, columns] packed into panels, padded with zeros.
pub struct Packed {
    lines: Vec<Line>,
    depth: usize,
}

impl Packed {
    /// Packs the matrix whose element (k, j) is `data[k * row + j * column]`, where `row` or `column` is 1.
    pub fn new(data: &[impl Value], [depth, columns]: [usize; 2], [row, column]: [usize; 2]) -> Self {
        let panels = columns.div_ceil(PANEL);
        let mut packed = Self { lines: vec![Line([0.0; 16]); panels * depth * PANEL / 16], depth };
        let pack = |(panel, to): (usize, &mut [f32])| {
            let first = panel * PANEL;
            let width = PANEL.min(columns - first);
            vectorized(|| pack_panel(&data[first * column..], to, width, [row, column]));
        };
        let parallel = depth * columns >= PARALLEL / 4;
        let chunk = (depth * PANEL).max(1);
        if parallel {
            packed.floats_mut().par_chunks_mut(chunk).enumerate().for_each(pack);
        } else {
            packed.floats_mut().chunks_mut(chunk).enumerate().for_each(pack);
        }
        packed
    }

    /// The operand.
    pub fn rhs(&self) -> Rhs<'_> {
        // SAFETY: a `Line` is sixteen floats without padding.
        let data = unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast::<f32>(), self.lines.len() * 16) };
        Rhs { data, panel: self.depth * PANEL, row: PANEL }
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: a `Line` is sixteen floats without padding.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<f32>(), self.lines.len() * 16) }
    }
}

#[inline(always)]
fn pack_panel(from: &[impl Value], to: &mut [f32], width: usize, [row, column]: [usize; 2]) {
    if column == 1 {
        for (k, to) in to.chunks_exact_mut(PANEL).enumerate() {
            for (to, from) in to.iter_mut().zip(&from[k * row..][..width]) {
                *to = from.wide();
            }
        }
        return;
    }
    debug_assert_eq!(row, 1);
    // a transpose, in strips of 16 steps that fill whole lines
    for (strip, to) in to.chunks_mut(16 * PANEL).enumerate() {
        let steps = to.len() / PANEL;
        for j in 0..width {
            let from = &from[j * column + strip * 16..][..steps];
            for (k, value) in from.iter().enumerate() {
                to[k * PANEL + j] = value.wide();
            }
        }
    }
}

/// What the sums start from.
#[derive(Clone, Copy)]
pub enum Start<'a> {
    Zero,
    /// The same row everywhere: a bias.
    Row(&'a [f32]),
    /// What the output holds.
    Existing,
}

/// [rows, columns, depth] of a product.
pub type Size = [usize; 3];

/// The product on this thread; `out` has rows of `stride` elements.
///
/// # Panics
/// If an operand is too short.
pub fn multiply(size: Size, lhs: Lhs, rhs: Rhs, start: Start, out: &mut [f32], stride: usize) {
    let [rows, columns, _] = size;
    assert!(rows == 0 || out.len() >= (rows - 1) * stride + columns && stride >= columns, "output for {rows} x {columns}");
    multiply_at(size, lhs, rhs, start, Out { data: out.as_mut_ptr(), stride, part: PhantomData });
}

/// The product on this thread as the first values of `out`, which it returns.
///
/// # Panics
/// If an operand is too short, or `start` is what the output holds.
pub fn multiply_new<'a>(size: Size, lhs: Lhs, rhs: Rhs, start: Start, out: &'a mut [MaybeUninit<f32>]) -> &'a mut [f32] {
    let [rows, columns, _] = size;
    assert!(out.len() == rows * columns && !matches!(start, Start::Existing), "new output for {rows} x {columns}");
    multiply_at(size, lhs, rhs, start, Out { data: out.as_mut_ptr().cast(), stride: columns, part: PhantomData });
    // SAFETY: all rows and columns have just been written.
    unsafe { &mut *(std::ptr::from_mut(out) as *mut [f32]) }
}

fn multiply_at([rows, columns, depth]: Size, lhs: Lhs, rhs: Rhs, start: Start, out: Out) {
    if rows == 0 || columns == 0 {
        return;
    }
    if let Start::Row(row) = start {
        assert_eq!(row.len(), columns, "start row");
    }
    if depth > 0 {
        assert!(lhs.data.len() > (rows - 1) * lhs.row + (depth - 1) * lhs.column, "left operand");
        let panels = columns.div_ceil(PANEL);
        assert!(rhs.data.len() >= (panels - 1) * rhs.panel + (depth - 1) * rhs.row + PANEL, "right operand");
    }
    pulp::Arch::new().dispatch(Multiply { size: [rows, columns, depth], lhs, rhs, start, out });
}

/// The product [rows, columns] on all threads.
///
/// # Panics
/// If an operand is too short.
pub fn multiply_parallel([rows, columns, depth]: Size, lhs: Lhs, rhs: Rhs, start: Start) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * columns);
    if rows < TASK_ROWS && columns > PANEL && rows * columns * depth >= PARALLEL {
        return multiply_columns([rows, columns, depth], lhs, rhs, start);
    }
    let spare = &mut out.spare_capacity_mut()[..rows * columns];
    let task = |(i, out): (usize, &mut [MaybeUninit<f32>])| {
        let lhs = Lhs { data: &lhs.data[i * TASK_ROWS * lhs.row..], ..lhs };
        multiply_new([out.len() / columns, columns, depth], lhs, rhs, start, out);
    };
    spare.par_chunks_mut((TASK_ROWS * columns).max(1)).enumerate().for_each(task);
    // SAFETY: the chunks cover the output, and each has been initialised.
    unsafe { out.set_len(rows * columns) };
    out
}

/// For few rows: the threads share the columns.
fn multiply_columns([rows, columns, depth]: Size, lhs: Lhs, rhs: Rhs, start: Start) -> Vec<f32> {
    let panels: Vec<Vec<f32>> = (0..columns.div_ceil(PANEL))
        .into_par_iter()
        .map(|panel| {
            let first = panel * PANEL;
            let width = PANEL.min(columns - first);
            let rhs = Rhs { data: &rhs.data[panel * rhs.panel..], ..rhs };
            let start = if let Start::Row(row) = start { Start::Row(&row[first..][..width]) } else { start };
            let mut out = vec![0.0; rows * width];
            multiply([rows, width, depth], lhs, rhs, start, &mut out, width);
            out
        })
        .collect();
    let mut out = Vec::with_capacity(rows * columns);
    for i in 0..rows {
        panels.iter().for_each(|panel| out.extend_from_slice(&panel[i * (panel.len() / rows)..][..panel.len() / rows]));
    }
    out
}

#[derive(Clone, Copy)]
struct Out<'a> {
    data: *mut f32,
    stride: usize,
    part: PhantomData<&'a mut [f32]>,
}

struct Multiply<'a> {
    size: Size,
    lhs: Lhs<'a>,
    rhs: Rhs<'a>,
    start: Start<'a>,
    out: Out<'a>,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let [rows, columns, depth] = self.size;
        let mut start = self.start;
        for from in (0..depth.max(1)).step_by(DEPTH) {
            let steps = DEPTH.min(depth - from);
            for column in (0..columns).step_by(S::F32_LANES * 2) {
                let width = (S::F32_LANES * 2).min(columns - column);
                let tile = Tile { from, steps, column, width, start };
                let mut row = 0;
                if S::REGISTER_COUNT >= 32 {
                    row = self.sweep::<S, 12>(simd, &tile, row, rows);
                }
                row = self.sweep::<S, 6>(simd, &tile, row, rows);
                row = self.sweep::<S, 3>(simd, &tile, row, rows);
                self.sweep::<S, 1>(simd, &tile, row, rows);
            }
            start = Start::Existing;
        }
    }
}

/// Columns and steps that are worked on.
struct Tile<'a> {
    from: usize,
    steps: usize,
    column: usize,
    width: usize,
    start: Start<'a>,
}

impl Multiply<'_> {
    /// All blocks of `R` rows from `row` on; returns the first row that is left.
    #[inline(always)]
    fn sweep<S: Simd, const R: usize>(&self, simd: S, tile: &Tile, mut row: usize, rows: usize) -> usize {
        while row + R <= rows {
            if tile.width <= S::F32_LANES {
                self.block::<S, R, 1>(simd, tile, row);
            } else {
                self.block::<S, R, 2>(simd, tile, row);
            }
            row += R;
        }
        row
    }

    #[inline(always)]
    fn block<S: Simd, const R: usize, const V: usize>(&self, simd: S, tile: &Tile, row: usize) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        self.load_start(simd, tile, row, &mut sums);
        // SAFETY: `multiply` has checked that all elements of the operands are in bounds.
        unsafe {
            let lhs = self.lhs.data.as_ptr().add(row * self.lhs.row + tile.from * self.lhs.column);
            let rhs = self.rhs.data.as_ptr().add(tile.column / PANEL * self.rhs.panel + tile.from * self.rhs.row + tile.column % PANEL);
            let lhs: [*const f32; R] = std::array::from_fn(|r| lhs.add(r * self.lhs.row));
            chains(simd, tile.steps, (lhs, self.lhs.column), (rhs, self.rhs.row), &mut sums);
        }
        self.store(simd, tile, row, &sums);
    }

    #[inline(always)]
    fn load_start<S: Simd, const R: usize, const V: usize>(&self, simd: S, tile: &Tile, row: usize, sums: &mut [[S::f32s; V]; R]) {
        match tile.start {
            Start::Zero => {}
            Start::Row(start) => {
                let start = partial(simd, &start[tile.column..][..tile.width]);
                *sums = [start; R];
            }
            Start::Existing => {
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: `multiply` has checked that this stretch lies in the output.
                    let old = unsafe { std::slice::from_raw_parts(self.at(row + r, tile.column), tile.width) };
                    *sums = partial(simd, old);
                }
            }
        }
    }

    #[inline(always)]
    fn store<S: Simd, const R: usize, const V: usize>(&self, simd: S, tile: &Tile, row: usize, sums: &[[S::f32s; V]; R]) {
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: as in `load_start`; no other reference to the output is alive.
            let out = unsafe { std::slice::from_raw_parts_mut(self.at(row + r, tile.column), tile.width) };
            for (v, sum) in sums.iter().enumerate() {
                let rest = &mut out[(v * S::F32_LANES).min(tile.width)..];
                if rest.len() >= S::F32_LANES {
                    // SAFETY: just checked.
                    unsafe { rest.as_mut_ptr().cast::<S::f32s>().write_unaligned(*sum) };
                } else {
                    simd.partial_store_f32s(rest, *sum);
                }
            }
        }
    }

    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> *mut f32 {
        self.out.data.wrapping_add(row * self.out.stride + column)
    }
}

/// A stretch of at most `V` vectors.
#[inline(always)]
fn partial<S: Simd, const V: usize>(simd: S, from: &[f32]) -> [S::f32s; V] {
    let mut vectors = [simd.splat_f32s(0.0); V];
    for (v, vector) in vectors.iter_mut().enumerate() {
        let rest = &from[(v * S::F32_LANES).min(from.len())..];
        if rest.len() >= S::F32_LANES {
            // SAFETY: just checked; any bits are a valid f32.
            *vector = unsafe { rest.as_ptr().cast::<S::f32s>().read_unaligned() };
        } else {
            *vector = simd.partial_load_f32s(rest);
        }
    }
    vectors
}

/// sums[r][v] += lhs[r][k] rhs[k][v] for all k.
///
/// # Safety
/// For every k below `steps`, `lhs[r] + k * lhs_step` and a vector at each of `rhs + k * rhs_step + v * lanes` can be read.
#[inline(always)]
unsafe fn chains<S: Simd, const R: usize, const V: usize>(
    simd: S,
    steps: usize,
    (lhs, lhs_step): ([*const f32; R], usize),
    (mut rhs, rhs_step): (*const f32, usize),
    sums: &mut [[S::f32s; V]; R],
) {
    let mut local = *sums;
    let mut offset = 0;
    for _ in 0..steps {
        let mut b = [simd.splat_f32s(0.0); V];
        for (v, b) in b.iter_mut().enumerate() {
            // SAFETY: by contract.
            *b = unsafe { rhs.add(v * S::F32_LANES).cast::<S::f32s>().read_unaligned() };
        }
        for r in 0..R {
            // SAFETY: by contract.
            let a = simd.splat_f32s(unsafe { *lhs[r].add(offset) });
            for v in 0..V {
                local[r][v] = simd.mul_add_e_f32s(a, b[v], local[r][v]);
            }
        }
        offset += lhs_step;
        rhs = rhs.wrapping_add(rhs_step);
    }
    *sums = local;
}
