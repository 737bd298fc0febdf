//! Clips to try the verifier on.

#![allow(dead_code)] // Each test binary uses a part.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use shapes::{Caption, RenderOptions, render};
use video::Frames;

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// A true clip of the default size.
pub fn clip(caption: &Caption, seed: u64) -> Frames {
    render(caption, &mut rng(seed), &RenderOptions::default())
}

/// The clip with Gaussian noise, clamped to [0, 1].
pub fn noisy(frames: &Frames, std: f32, seed: u64) -> Frames {
    let mut rng = rng(seed ^ 0x5eed);
    let mut unit = move || (rng.next_u32() as f32 + 0.5) / 4_294_967_296.0;
    let mut normal = move || (-2.0 * unit().max(1e-9).ln()).sqrt() * (std::f32::consts::TAU * unit()).cos();
    let data = frames.data().iter().map(|value| (value + std * normal()).clamp(0.0, 1.0)).collect();
    same_size(frames, data)
}

/// The clip blurred by about one pixel: [1 2 1] / 4, twice, in both directions.
pub fn blur(frames: &Frames) -> Frames {
    let (height, width) = (frames.height() as isize, frames.width() as isize);
    let mut data = frames.data().to_vec();
    for (dy, dx) in [(1, 0), (0, 1), (1, 0), (0, 1)] {
        let source = data.clone();
        let at = |f: usize, y: isize, x: isize, c: usize| {
            let (y, x) = (y.clamp(0, height - 1) as usize, x.clamp(0, width - 1) as usize);
            source[((f * height as usize + y) * width as usize + x) * 3 + c]
        };
        for (index, value) in data.iter_mut().enumerate() {
            let (c, pixel) = (index % 3, (index / 3) as isize);
            let (x, y, f) = (pixel % width, pixel / width % height, (pixel / width / height) as usize);
            *value = (at(f, y - dy, x - dx, c) + 2.0 * at(f, y, x, c) + at(f, y + dy, x + dx, c)) / 4.0;
        }
    }
    same_size(frames, data)
}

/// A clip made by calling `draw` on every frame of `data`.
pub fn edit(num_frames: usize, height: usize, width: usize, mut data: Vec<f32>, draw: impl Fn(&mut [f32], usize)) -> Frames {
    for (index, frame) in data.chunks_exact_mut(height * width * 3).enumerate() {
        draw(frame, index);
    }
    Frames::new(num_frames, height, width, data).expect("sizes agree")
}

/// Paints a disc.
pub fn paint_disc(frame: &mut [f32], width: usize, center: (f32, f32), radius: f32, color: [f32; 3]) {
    for (index, pixel) in frame.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (x, y) = ((index % width) as f32 + 0.5, (index / width) as f32 + 0.5);
        if (x - center.0).hypot(y - center.1) <= radius {
            *pixel = color;
        }
    }
}

fn same_size(frames: &Frames, data: Vec<f32>) -> Frames {
    Frames::new(frames.num_frames(), frames.height(), frames.width(), data).expect("sizes agree")
}
