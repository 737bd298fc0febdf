//! What the verifier promises, with numbers.

#![allow(clippy::print_stderr)] // The measured numbers, for `--nocapture`.

mod common;

use common::{blur, clip, noisy, rng};
use shapes::{Caption, Color, Motion, RenderOptions, Shape, all_captions, render, score};
use video::Frames;

const SEEDS: u64 = 4;

/// (mean, worst) of the total over true clips, each changed by `change`.
fn true_totals(change: impl Fn(Frames, u64) -> Frames, options: &RenderOptions) -> (f32, f32) {
    let mut totals = Vec::new();
    for caption in all_captions() {
        for seed in 0..SEEDS {
            let frames = change(render(&caption, &mut rng(seed), options), seed);
            totals.push(score(&frames, &caption).total);
        }
    }
    (totals.iter().sum::<f32>() / totals.len() as f32, totals.iter().copied().fold(1.0, f32::min))
}

#[test]
fn true_clips_score_near_one() {
    let options = RenderOptions::default();
    for (name, (mean, worst)) in [
        ("clean", true_totals(|frames, _| frames, &options)),
        ("noise 0.05", true_totals(|frames, seed| noisy(&frames, 0.05, seed), &options)),
        ("blur 1 px", true_totals(|frames, _| blur(&frames), &options)),
        ("blur and noise", true_totals(|frames, seed| noisy(&blur(&frames), 0.05, seed), &options)),
    ] {
        eprintln!("{name}: mean {mean:.4}, worst {worst:.4}");
        assert!(worst >= 0.95, "{name}: worst {worst}");
    }
}

#[test]
fn true_clips_of_other_sizes_score_near_one() {
    for (num_frames, height, width) in [(5, 64, 64), (17, 64, 64), (9, 48, 80), (9, 32, 32), (5, 120, 208)] {
        let (mean, worst) = true_totals(|frames, _| frames, &RenderOptions { num_frames, height, width });
        eprintln!("{num_frames}x{height}x{width}: mean {mean:.4}, worst {worst:.4}");
        // At 32 pixels the outline is a large part of the object.
        assert!(worst >= if height < 48 { 0.93 } else { 0.95 }, "{num_frames}x{height}x{width}: worst {worst}");
    }
}

#[test]
fn mismatched_captions_score_low() {
    let captions = all_captions();
    let (mut sum, mut count, mut worst) = (0.0, 0.0, 0.0f32);
    for (seed, shown) in captions.iter().enumerate() {
        let frames = clip(shown, seed as u64);
        for caption in captions.iter().filter(|&caption| caption != shown) {
            let total = score(&frames, caption).total;
            sum += total;
            count += 1.0;
            worst = worst.max(total);
        }
    }
    eprintln!("mismatched: mean {:.4}, worst {worst:.4}", sum / count);
    assert!(sum / count <= 0.35, "mean {}", sum / count);
    assert!(worst <= 0.70, "worst {worst}");
}

#[test]
fn each_attribute_is_told_by_its_own_component() {
    for (seed, caption) in all_captions().into_iter().enumerate() {
        let frames = clip(&caption, seed as u64);
        let colors = Color::ALL.into_iter().filter(|&color| color != caption.color);
        assert!(colors.map(|color| score(&frames, &Caption { color, ..caption }).color).all(|s| s < 0.1));
        let shapes = Shape::ALL.into_iter().filter(|&shape| shape != caption.shape);
        assert!(shapes.map(|shape| score(&frames, &Caption { shape, ..caption }).shape).all(|s| s < 0.1));
        let motions = Motion::ALL.into_iter().filter(|&motion| motion != caption.motion);
        assert!(motions.map(|motion| score(&frames, &Caption { motion, ..caption }).motion).all(|s| s < 0.1));
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "measures optimised code")]
fn a_score_costs_less_than_a_millisecond() {
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    let frames = clip(&caption, 1);
    let seconds = (0..50).map(|_| {
        let start = std::time::Instant::now();
        std::hint::black_box(score(std::hint::black_box(&frames), &caption));
        start.elapsed().as_secs_f64()
    });
    let fastest = seconds.fold(f64::INFINITY, f64::min);
    eprintln!("one score: {:.0} us", fastest * 1e6);
    assert!(fastest < 1e-3, "{fastest} s");
}
