//! Draws clips of captions.
//!
//! Shape legend: F frames, H height, W width.

use rand_chacha::rand_core::Rng;
use video::Frames;

use crate::{Caption, Motion, geometry::Extent};

/// The RGB value of everything that is not the object: a constant dark grey.
pub const BACKGROUND: [f32; 3] = [0.12; 3];

/// The radius of the circle of equal area, as a share of min(H, W): smallest and largest.
const RADIUS: (f32, f32) = (0.18, 0.21);

/// The way the object goes over the clip, as a share of the frame along the motion: shortest and longest.
const TRAVEL: (f32, f32) = (0.35, 0.40);

/// The way an object is expected to go: the middle of [`TRAVEL`].
pub(crate) const NOMINAL_TRAVEL: f32 = (TRAVEL.0 + TRAVEL.1) / 2.0;

/// The largest drift across the motion over the clip, as a share of the frame.
const DRIFT: f32 = 0.02;

/// The size of a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderOptions {
    /// F.
    pub num_frames: usize,
    /// H, in pixels.
    pub height: usize,
    /// W, in pixels.
    pub width: usize,
}

impl Default for RenderOptions {
    /// 9 frames of 64 x 64, the size of the embedded model.
    fn default() -> Self {
        Self { num_frames: 9, height: 64, width: 64 }
    }
}

/// Draws one clip of `caption`: one anti-aliased object on [`BACKGROUND`], fully in frame, moving at constant speed.
///
/// Size, start, travel and a slight drift are drawn from `rng`, always five numbers, so the clip is a function of the generator's state.
///
/// # Panics
///
/// When a size in `options` is zero.
pub fn render(caption: &Caption, rng: &mut impl Rng, options: &RenderOptions) -> Frames {
    let &RenderOptions { num_frames, height, width } = options;
    let scene = Scene::draw(caption, rng, options);
    let mut data = Vec::with_capacity(num_frames * height * width * 3);
    for index in 0..num_frames {
        let (center_x, center_y) = scene.center(index, num_frames);
        for row in 0..height {
            for column in 0..width {
                let (x, y) = (column as f32 + 0.5 - center_x, row as f32 + 0.5 - center_y);
                let coverage = caption.shape.coverage(x, y, scene.radius);
                data.extend(mix(BACKGROUND, caption.color.rgb(), coverage));
            }
        }
    }
    Frames::new(num_frames, height, width, data).expect("sizes in `options` are not zero")
}

/// The random part of a clip, in pixels.
struct Scene {
    radius: f32,
    start: (f32, f32),
    end: (f32, f32),
}

impl Scene {
    fn draw(caption: &Caption, rng: &mut impl Rng, options: &RenderOptions) -> Self {
        let (width, height) = (options.width as f32, options.height as f32);
        let radius = uniform(rng, RADIUS) * width.min(height);
        let travel = uniform(rng, TRAVEL);
        let drift = uniform(rng, (-DRIFT, DRIFT));
        let (along_x, along_y) = caption.motion.direction();
        let across = match caption.motion {
            Motion::Left | Motion::Right => (0.0, 1.0),
            Motion::Up | Motion::Down => (1.0, 0.0),
        };
        let move_x = (along_x * travel + across.0 * drift) * width;
        let move_y = (along_y * travel + across.1 * drift) * height;
        let Extent { side, up, down } = caption.shape.extent(radius);
        let x = start(uniform(rng, (0.0, 1.0)), width, (side, side), move_x);
        let y = start(uniform(rng, (0.0, 1.0)), height, (up, down), move_y);
        Self { radius, start: (x, y), end: (x + move_x, y + move_y) }
    }

    /// The centroid in frame `index`.
    fn center(&self, index: usize, num_frames: usize) -> (f32, f32) {
        let t = index as f32 / (num_frames.max(2) - 1) as f32;
        let at = |start: f32, end: f32| start + t * (end - start);
        (at(self.start.0, self.end.0), at(self.start.1, self.end.1))
    }
}

/// A start coordinate such that an object reaching `extent` (before, after) stays within [0, size] while it moves by `travel`; `share` in
/// [0, 1] picks among those. The middle one where none exists.
fn start(share: f32, size: f32, extent: (f32, f32), travel: f32) -> f32 {
    let low = extent.0 - travel.min(0.0);
    let high = size - extent.1 - travel.max(0.0);
    let share = if low < high { share } else { 0.5 };
    low + share * (high - low)
}

/// A number between `low` and `high`, from the upper 24 bits of one draw.
pub(crate) fn uniform(rng: &mut impl Rng, (low, high): (f32, f32)) -> f32 {
    let unit = (rng.next_u32() >> 8) as f32 / (1u32 << 24) as f32;
    low + unit * (high - low)
}

pub(crate) fn mix(from: [f32; 3], to: [f32; 3], share: f32) -> [f32; 3] {
    [0, 1, 2].map(|channel| from[channel] + share * (to[channel] - from[channel]))
}
