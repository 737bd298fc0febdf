//! RGB to the planes a video encoder takes.
//!
//! Shape legend: H height, W width, both even here.

use crate::{Frames, frames::unit};

/// One frame as BT.709 limited-range 4:2:0: luma [H, W], chroma [H/2, W/2], sizes rounded up to even.
pub(crate) struct Yuv {
    width: usize,
    height: usize,
    y: Vec<u8>,
    u: Vec<u8>,
    v: Vec<u8>,
}

impl Yuv {
    /// Converts frame `index`. Sizes below `smallest`, or odd ones, are extended by repeating the last row or column.
    ///
    /// ```text
    /// Y = 0.2126 R + 0.7152 G + 0.0722 B      luma = 16 + 219 Y
    /// Cb = (B - Y) / 1.8556                   u = 128 + 224 Cb, mean of 2 x 2 pixels
    /// Cr = (R - Y) / 1.5748                   v = 128 + 224 Cr, likewise
    /// ```
    ///
    /// from ITU-R BT.709-6, items 3.2 to 3.4.
    pub(crate) fn from_frame(frames: &Frames, index: usize, smallest: usize) -> Self {
        let width = frames.width().max(smallest).next_multiple_of(2);
        let height = frames.height().max(smallest).next_multiple_of(2);
        let mut y = vec![0; height * width];
        let mut chroma = vec![[0.0f32; 2]; height * width / 4];
        for row in 0..height {
            for column in 0..width {
                let (row_in, column_in) = (row.min(frames.height() - 1), column.min(frames.width() - 1));
                let [luma, cb, cr] = bt709(frames.pixel(index, row_in, column_in).map(unit));
                y[row * width + column] = (16.0 + 219.0 * luma).round() as u8;
                let block = &mut chroma[row / 2 * (width / 2) + column / 2];
                block[0] += cb / 4.0;
                block[1] += cr / 4.0;
            }
        }
        let plane = |which: usize| chroma.iter().map(|c| (128.0 + 224.0 * c[which]).round() as u8).collect();
        Self { width, height, y, u: plane(0), v: plane(1) }
    }

    /// Width and height of the luma plane.
    pub(crate) fn dimensions(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// Luma and the two chroma planes, without gaps between rows.
    pub(crate) fn planes(&self) -> (&[u8], &[u8], &[u8]) {
        (&self.y, &self.u, &self.v)
    }
}

/// Y in [0, 1], Cb and Cr in [-1/2, 1/2].
fn bt709([r, g, b]: [f32; 3]) -> [f32; 3] {
    let y = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    [y, (b - y) / 1.8556, (r - y) / 1.5748]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primaries_have_their_standard_values() {
        // The 100 % colour bars of BT.709, limited range.
        for (rgb, expected) in [
            ([1.0, 1.0, 1.0], [235, 128, 128]),
            ([0.0, 0.0, 0.0], [16, 128, 128]),
            ([1.0, 0.0, 0.0], [63, 102, 240]),
            ([0.0, 1.0, 0.0], [173, 42, 26]),
            ([0.0, 0.0, 1.0], [32, 240, 118]),
        ] {
            let frames = Frames::new(1, 1, 1, rgb.to_vec()).expect("sizes agree");
            let yuv = Yuv::from_frame(&frames, 0, 2);
            assert_eq!((yuv.width, yuv.height), (2, 2));
            assert_eq!([yuv.y[3], yuv.u[0], yuv.v[0]], expected, "{rgb:?}");
        }
    }
}
