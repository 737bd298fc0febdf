//! Large frames in overlapping tiles, whose seams are blended linearly: less memory, slightly different results.
//!
//! Legend: `B` batch, `C` channels, `F` frames, `H` height, `W` width.

use burn::tensor::{Tensor, TensorData};

/// Size and distance of tiles in pixels, as (height, width).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Size of a tile; a frame not larger than this is not divided.
    pub tile: (usize, usize),
    /// Distance between the origins of neighbouring tiles.
    pub stride: (usize, usize),
}

/// The sizes of the reference.
impl Default for Tiling {
    fn default() -> Self {
        Self { tile: (256, 256), stride: (192, 192) }
    }
}

impl Tiling {
    /// The same tiles counted in latents.
    ///
    /// # Panics
    /// If the tiles do not overlap, or the sizes are no multiples of `factor`.
    pub fn in_latents(self, factor: usize) -> Self {
        let scale = |size: usize, stride: usize| {
            let fits = size.is_multiple_of(factor) && stride.is_multiple_of(factor);
            assert!(fits && 0 < stride && stride <= size, "tile {size}, stride {stride}: multiples of {factor}, stride <= tile");
            (size / factor, stride / factor)
        };
        let (rows, columns) = (scale(self.tile.0, self.stride.0), scale(self.tile.1, self.stride.1));
        Self { tile: (rows.0, columns.0), stride: (rows.1, columns.1) }
    }

    /// Whether a frame of this size is divided.
    pub fn divides(&self, height: usize, width: usize) -> bool {
        height > self.tile.0 || width > self.tile.1
    }

    /// Sizes of the tiles of a frame, row by row.
    pub fn tiles(&self, height: usize, width: usize) -> Vec<(usize, usize)> {
        let columns = || (0..width).step_by(self.stride.1).map(|left| self.tile.1.min(width - left));
        let rows = (0..height).step_by(self.stride.0).map(|top| self.tile.0.min(height - top));
        rows.flat_map(|tall| columns().map(move |wide| (tall, wide))).collect()
    }

    /// Applies `f` to each tile of x [B, C, F, H, W] and joins the results, which are cut and blended by `output`.
    pub fn map(&self, x: &Tensor<5>, output: &Self, f: impl Fn(Tensor<5>) -> Tensor<5>) -> Tensor<5> {
        let [.., height, width] = x.dims();
        let mut rows = Vec::new();
        let mut above: Vec<Tensor<5>> = Vec::new();
        for top in (0..height).step_by(self.stride.0) {
            let mut row: Vec<Tensor<5>> = Vec::new();
            for (column, left) in (0..width).step_by(self.stride.1).enumerate() {
                let (tall, wide) = (self.tile.0.min(height - top), self.tile.1.min(width - left));
                let mut tile = f(x.clone().narrow(3, top, tall).narrow(4, left, wide));
                if let Some(above) = above.get(column) {
                    tile = blend(above.clone(), tile, 3, output.tile.0 - output.stride.0);
                }
                if let Some(left) = row.last() {
                    tile = blend(left.clone(), tile, 4, output.tile.1 - output.stride.1);
                }
                row.push(tile);
            }
            let cut = row.iter().map(|tile| crop(tile.clone(), output.stride)).collect();
            rows.push(Tensor::cat(cut, 4));
            above = row;
        }
        Tensor::cat(rows, 3)
    }
}

fn crop(x: Tensor<5>, (height, width): (usize, usize)) -> Tensor<5> {
    let [.., h, w] = x.dims();
    x.narrow(3, 0, h.min(height)).narrow(4, 0, w.min(width))
}

/// Fades from the end of `a` to the start of `b` along `dim` over `extent` positions.
fn blend(a: Tensor<5>, b: Tensor<5>, dim: usize, extent: usize) -> Tensor<5> {
    let (len_a, len_b) = (a.dims()[dim], b.dims()[dim]);
    let extent = extent.min(len_a).min(len_b);
    if extent == 0 {
        return b;
    }
    let ramp: Vec<f32> = (0..extent).map(|i| (i as f64 / extent as f64) as f32).collect();
    let mut shape = [1; 5];
    shape[dim] = extent;
    let ramp: Tensor<5> = Tensor::from_data(TensorData::new(ramp, shape), (&b.device(), b.dtype()));
    // a (1 - y/extent) + b y/extent
    let (end, start) = (a.narrow(dim, len_a - extent, extent), b.clone().narrow(dim, 0, extent));
    let seam = end.clone() + (start - end) * ramp;
    if extent == len_b { seam } else { Tensor::cat(vec![seam, b.narrow(dim, extent, len_b - extent)], dim) }
}
