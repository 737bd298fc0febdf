//! Where everything lies: the padded copy of a frame, and the taps that read it.
//!
//! A frame is copied into a plane with room for the padding. In the flat plane, a tap of the kernel is one constant
//! offset, so that a convolution is a sum of shifted planes without any edge case. The ends of the rows give a few
//! meaningless outputs, which are computed and left out.

/// Sizes of one convolution. Three numbers are in the order time, height, width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Clips.
    pub batch: usize,
    /// Channels of the input.
    pub inputs: usize,
    /// Channels of the output.
    pub outputs: usize,
    /// Size of the input as it is stored.
    pub size: [usize; 3],
    /// Every value is repeated this many times in height and width before the convolution.
    pub enlarge: usize,
    /// Size of the kernel.
    pub kernel: [usize; 3],
    /// Step between outputs.
    pub stride: [usize; 3],
    /// Zeros (before, after) each axis.
    pub padding: [(usize, usize); 3],
}

impl ConvShape {
    /// Size of what is convolved: the input, enlarged.
    pub fn enlarged_size(&self) -> [usize; 3] {
        let [frames, height, width] = self.size;
        [frames, height * self.enlarge, width * self.enlarge]
    }

    /// Size of the output.
    pub fn output_size(&self) -> [usize; 3] {
        let size = self.enlarged_size();
        std::array::from_fn(|i| {
            let (before, after) = self.padding[i];
            (size[i] + before + after - self.kernel[i]) / self.stride[i] + 1
        })
    }

    /// Number of elements of the output.
    pub fn output_len(&self) -> usize {
        self.batch * self.outputs * self.output_size().iter().product::<usize>()
    }

    /// Number of elements of the input.
    pub fn input_len(&self) -> usize {
        self.batch * self.inputs * self.size.iter().product::<usize>()
    }

    /// Number of elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.outputs * self.inputs * self.kernel.iter().product::<usize>()
    }

    /// Whether the transposed convolution can be computed: no more padding than the kernel reaches.
    pub fn is_supported(&self) -> bool {
        let size = self.enlarged_size();
        (0..3).all(|i| {
            let (before, after) = self.padding[i];
            let padded = size[i] + before + after;
            before < self.kernel[i] && after < self.kernel[i] && self.kernel[i] <= padded
        })
    }
}

/// The padded plane of one channel of one frame. With a stride it is split into `phases`, one for each remainder of row
/// and column, so that neighbouring outputs read neighbouring elements.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Elements from row to row.
    pub pitch: usize,
    /// Elements of the plane, all phases together.
    pub plane: usize,
    rows: usize,
    origin: [usize; 2],
    phases: [usize; 2],
    dilation: [usize; 2],
    enlarge: usize,
}

impl Grid {
    /// Copies a frame's channel [H, W] into its plane; the zeros around it are left as they are.
    pub fn pack(&self, source: &[f32], width: usize, plane: &mut [f32]) {
        let ([top, left], [down, right], [tall, wide]) = (self.origin, self.phases, self.dilation);
        let phase = self.rows * self.pitch;
        for (y, row) in source.chunks_exact(width).flat_map(|row| std::iter::repeat_n(row, self.enlarge)).enumerate() {
            let y = y * tall + top;
            let start = (y % down) * right * phase + (y / down) * self.pitch;
            match (right, wide, self.enlarge) {
                (1, 1, 1) => plane[start + left..][..width].copy_from_slice(row),
                (1, 1, 2) => {
                    let to = &mut plane[start + left..][..2 * width];
                    to.chunks_exact_mut(2).zip(row).for_each(|(to, value)| to.fill(*value));
                }
                _ => {
                    let row = row.iter().flat_map(|value| std::iter::repeat_n(value, self.enlarge));
                    for (x, value) in row.enumerate() {
                        let x = x * wide + left;
                        plane[start + (x % right) * phase + x / right] = *value;
                    }
                }
            }
        }
    }

    /// Offset of tap (row, column) in the plane.
    fn tap(&self, row: usize, column: usize) -> usize {
        let [down, right] = self.phases;
        let phase = (row % down) * right + column % right;
        (phase * self.rows + row / down) * self.pitch + column / right
    }
}

/// A convolution as a sum over taps: for each frame of the destination, which frames of the source it reads and with
/// which slice of the kernel; within a frame, at which offsets.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// Clips.
    pub batch: usize,
    /// Channels of the source and of the destination.
    pub channels: [usize; 2],
    /// Size of the source.
    pub source: [usize; 3],
    /// Size of the destination.
    pub destination: [usize; 3],
    /// Layout of a packed frame of the source.
    pub grid: Grid,
    /// Offsets in a packed frame of all (channel, row, column) of the kernel.
    pub taps: Vec<usize>,
    /// For each frame of the destination: (slice of the kernel, frame of the source).
    pub frames: Vec<Vec<(usize, usize)>>,
}

impl Sweep {
    /// Input to output.
    pub fn forward(shape: &ConvShape) -> Self {
        let [_, kh, kw] = shape.kernel;
        let [st, sh, sw] = shape.stride;
        let [(front, _), (top, bottom), (left, right)] = shape.padding;
        let [_, height, width] = shape.enlarged_size();
        let rows = (height + top + bottom).div_ceil(sh);
        let pitch = (width + left + right).div_ceil(sw);
        let grid = Grid {
            pitch,
            rows,
            plane: sh * sw * rows * pitch,
            origin: [top, left],
            phases: [sh, sw],
            dilation: [1, 1],
            enlarge: shape.enlarge,
        };
        let frames = |t: usize| {
            let reach = (0..shape.kernel[0]).filter(|k| (front..front + shape.size[0]).contains(&(t * st + k)));
            reach.map(|k| (k, t * st + k - front)).collect()
        };
        let destination = shape.output_size();
        Self {
            batch: shape.batch,
            channels: [shape.inputs, shape.outputs],
            source: shape.size,
            destination,
            taps: list_taps(&grid, shape.inputs, kh, kw),
            grid,
            frames: (0..destination[0]).map(frames).collect(),
        }
    }

    /// Gradient of the output to gradient of the enlarged input: the kernel is mirrored, and a stride becomes gaps in the source.
    pub fn transposed(shape: &ConvShape) -> Self {
        let [kt, kh, kw] = shape.kernel;
        let [(front, _), (top, _), (left, _)] = shape.padding;
        let [_, height, width] = shape.enlarged_size();
        let rows = height + kh - 1;
        let pitch = width + kw - 1;
        let grid = Grid {
            pitch,
            rows,
            plane: rows * pitch,
            origin: [kh - 1 - top, kw - 1 - left],
            phases: [1, 1],
            dilation: [shape.stride[1], shape.stride[2]],
            enlarge: 1,
        };
        let source = shape.output_size();
        let frames = |t: usize| {
            let reach = (0..kt).filter(|k| t + front >= *k && (t + front - k).is_multiple_of(shape.stride[0]));
            let reach = reach.map(|k| (k, (t + front - k) / shape.stride[0]));
            reach.filter(|(_, from)| *from < source[0]).collect()
        };
        Self {
            batch: shape.batch,
            channels: [shape.outputs, shape.inputs],
            source,
            destination: shape.enlarged_size(),
            taps: list_taps(&grid, shape.outputs, kh, kw),
            grid,
            frames: (0..shape.size[0]).map(frames).collect(),
        }
    }

    /// Positions of a frame of the destination in the flat plane, including the meaningless ones between rows.
    pub fn positions(&self) -> usize {
        (self.destination[1] - 1) * self.grid.pitch + self.destination[2]
    }

    /// Elements of a packed frame, with room for reading `overrun` elements too far.
    pub fn packed_len(&self, overrun: usize) -> usize {
        self.channels[0] * self.grid.plane + overrun
    }
}

fn list_taps(grid: &Grid, channels: usize, kh: usize, kw: usize) -> Vec<usize> {
    let mut taps = Vec::with_capacity(channels * kh * kw);
    for channel in 0..channels {
        for row in 0..kh {
            taps.extend((0..kw).map(|column| channel * grid.plane + grid.tap(row, column)));
        }
    }
    taps
}
