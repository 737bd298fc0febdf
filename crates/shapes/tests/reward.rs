//! The verifier as a reward: near misses earn a part, tricks earn nothing.

#![allow(clippy::print_stderr)] // The measured numbers, for `--nocapture`.

mod common;

use common::{clip, edit, noisy, paint_disc};
use shapes::{BACKGROUND, Caption, Color, Score, all_captions, score};
use video::Frames;

/// The best total any caption gets from `frames`.
fn best(frames: &Frames) -> Score {
    let scores = all_captions().into_iter().map(|caption| score(frames, &caption));
    scores.max_by(|a, b| a.total.total_cmp(&b.total)).expect("there are captions")
}

#[test]
fn clips_without_an_object_score_zero() {
    let blank = |value: f32| Frames::new(9, 64, 64, vec![value; 9 * 64 * 64 * 3]).expect("sizes agree");
    for (name, frames) in [
        ("background", blank(BACKGROUND[0])),
        ("black", blank(0.0)),
        ("white", blank(1.0)),
        ("nan", blank(f32::NAN)),
        ("infinite", blank(f32::INFINITY)),
        ("slight noise", noisy(&blank(0.12), 0.05, 1)),
        ("noise", noisy(&blank(0.5), 0.3, 1)),
        ("dark noise", noisy(&blank(0.12), 0.2, 1)),
    ] {
        let total = best(&frames).total;
        assert!(total <= 0.01, "{name}: {total}");
    }
}

/// Asserts that a clip drawn frame by frame on the background earns at most `limit` as "a red circle moves right".
fn assert_low(name: &str, limit: f32, draw: impl Fn(&mut [f32], usize)) {
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    let frames = edit(9, 64, 64, vec![BACKGROUND[0]; 9 * 64 * 64 * 3], draw);
    let score = score(&frames, &caption);
    eprintln!("{name}: {score:?}");
    assert!(score.total <= limit, "{name}: {score:?}");
}

/// Where the centre of a disc that moves right is in frame `index`.
fn x(index: usize) -> f32 {
    18.0 + 3.0 * index as f32
}

const RED: [f32; 3] = Color::Red.rgb();

#[test]
fn objects_of_the_wrong_size_score_low() {
    assert_low("huge blob", 0.05, |frame, _| paint_disc(frame, 64, (32.0, 32.0), 30.0, RED));
    assert_low("tint", 0.01, |frame, _| frame.as_chunks_mut::<3>().0.fill(RED));
    assert_low("tiny dot", 0.05, |frame, i| paint_disc(frame, 64, (x(i), 32.0), 4.0, RED));
    assert_low("pulsing size", 0.35, |frame, i| {
        paint_disc(frame, 64, (x(i), 32.0), if i % 2 == 0 { 9.5 } else { 15.5 }, RED);
    });
}

#[test]
fn anything_but_one_compact_object_scores_low() {
    assert_low("two blobs", 0.05, |frame, i| {
        paint_disc(frame, 64, (x(i), 15.0), 9.0, RED);
        paint_disc(frame, 64, (x(i), 48.0), 9.0, RED);
    });
    assert_low("four blobs", 0.05, |frame, i| {
        for (left, top) in [(-8.0, 14.0), (16.0, 14.0), (-8.0, 50.0), (16.0, 50.0)] {
            paint_disc(frame, 64, (x(i) + left, top), 6.5, RED);
        }
    });
    assert_low("ring", 0.05, |frame, i| {
        paint_disc(frame, 64, (x(i), 32.0), 15.0, RED);
        paint_disc(frame, 64, (x(i), 32.0), 9.0, BACKGROUND);
    });
    assert_low("bright background", 0.05, |frame, i| {
        frame.fill(0.45);
        paint_disc(frame, 64, (x(i), 32.0), 12.5, RED);
    });
}

#[test]
fn objects_that_come_and_go_score_low() {
    assert_low("flicker", 0.05, |frame, i| {
        if i % 2 == 0 {
            paint_disc(frame, 64, (x(i), 32.0), 12.5, RED);
        }
    });
    assert_low("teleport", 0.05, |frame, i| {
        paint_disc(frame, 64, (if i < 5 { 18.0 } else { 46.0 }, 32.0), 12.5, RED);
    });
    assert_low("jumping about", 0.05, |frame, i| {
        let jump = |step: usize| 18.0 + 3.5 * ((i * step) % 9) as f32;
        paint_disc(frame, 64, (jump(5), jump(7)), 12.5, RED);
    });
}

/// A clip of a disc from `from` to `to` (x, y), of one colour.
fn disc(color: [f32; 3], from: (f32, f32), to: (f32, f32)) -> Frames {
    edit(9, 64, 64, vec![BACKGROUND[0]; 9 * 64 * 64 * 3], |frame, index| {
        let t = index as f32 / 8.0;
        paint_disc(frame, 64, (from.0 + t * (to.0 - from.0), from.1 + t * (to.1 - from.1)), 12.5, color);
    })
}

#[test]
fn motion_is_graded() {
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    let scores = [-24.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 24.0]
        .map(|travel| score(&disc(RED, (32.0 - travel / 2.0, 32.0), (32.0 + travel / 2.0, 32.0)), &caption));
    eprintln!("motion by travel: {:?}", scores.map(|score| score.motion));
    assert!(scores[0].motion < 0.01 && scores[1].motion < 0.01);
    assert!(scores[1..8].windows(2).all(|pair| pair[1].motion > pair[0].motion + 0.1));
    assert!((0.5..0.75).contains(&scores[5].motion), "half the travel: {}", scores[5].motion);
    assert!(scores[8].total > 0.95);
}

#[test]
fn crooked_motion_is_worth_less() {
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    let diagonal = score(&disc(RED, (20.0, 20.0), (44.0, 44.0)), &caption);
    assert!((0.05..0.5).contains(&diagonal.motion), "diagonal: {}", diagonal.motion);
    let back_and_forth = edit(9, 64, 64, vec![BACKGROUND[0]; 9 * 64 * 64 * 3], |frame, index| {
        let x = 18.0 + 24.0 * (1.0 - (index as f32 / 4.0 - 1.0).abs());
        paint_disc(frame, 64, (x, 32.0), 12.5, RED);
    });
    let score = score(&back_and_forth, &caption);
    assert!(score.motion < 0.1 && score.total < 0.2, "{score:?}");
}

#[test]
fn color_is_graded() {
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    for other in Color::ALL.into_iter().filter(|&color| color != Color::Red) {
        let scores = [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0].map(|share: f32| {
            let color = [0, 1, 2].map(|c| RED[c] + share * (other.rgb()[c] - RED[c]));
            score(&disc(color, (20.0, 32.0), (44.0, 32.0)), &caption).color
        });
        eprintln!("red to {other}: {scores:?}");
        assert!(scores.windows(2).all(|pair| pair[1] <= pair[0]), "{scores:?}");
        assert!(scores[0] > 0.98 && scores[6] < 0.02 && (0.1..=0.5).contains(&scores[3]), "{scores:?}");
    }
    for grey in [0.45, 0.6, 0.8, 1.0] {
        let color = score(&disc([grey; 3], (20.0, 32.0), (44.0, 32.0)), &caption).color;
        assert!(color < 0.2, "grey {grey}: {color}");
    }
    let faded = Color::Red.rgb().map(|value| 0.6 * value + 0.4 * BACKGROUND[0]);
    let faded = score(&disc(faded, (20.0, 32.0), (44.0, 32.0)), &caption).color;
    assert!((0.4..0.95).contains(&faded), "faded: {faded}");
}

#[test]
fn shape_is_graded() {
    let morph = |share: f32| {
        edit(9, 64, 64, vec![BACKGROUND[0]; 9 * 64 * 64 * 3], |frame, index| {
            for (at, pixel) in frame.as_chunks_mut::<3>().0.iter_mut().enumerate() {
                let x = ((at % 64) as f32 + 0.5 - 20.0 - 3.0 * index as f32).abs();
                let y = ((at / 64) as f32 + 0.5 - 32.0).abs();
                // From a circle to a square of the same area.
                let distance = (1.0 - share) * (x.hypot(y) - 12.5) + share * (x.max(y) - 0.886 * 12.5);
                if distance <= 0.0 {
                    *pixel = RED;
                }
            }
        })
    };
    let caption: Caption = "a red circle moves right".parse().expect("a caption");
    let scores = [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| score(&morph(share), &caption).shape);
    eprintln!("circle to square: {scores:?}");
    assert!(scores.windows(2).all(|pair| pair[1] <= pair[0]), "{scores:?}");
    assert!(scores[0] > 0.98 && scores[4] < 0.02 && (0.25..0.75).contains(&scores[2]), "{scores:?}");
}

#[test]
fn quality_is_graded() {
    let caption: Caption = "a blue triangle moves up".parse().expect("a caption");
    let frames = clip(&caption, 5);
    let by_noise = [0.05, 0.08, 0.1, 0.12, 0.15].map(|std| score(&noisy(&frames, std, 1), &caption));
    eprintln!("noise: {by_noise:?}");
    assert!(by_noise.windows(2).all(|pair| pair[1].total < pair[0].total));
    assert!(by_noise[2].total > 0.9 && (0.1..0.7).contains(&by_noise[3].total) && by_noise[4].total < 0.1);

    let mut blurred = frames;
    let by_blur = [1, 4, 4, 8].map(|times| {
        for _ in 0..times {
            blurred = common::blur(&blurred);
        }
        score(&blurred, &caption)
    });
    eprintln!("blur: {by_blur:?}");
    assert!(by_blur.windows(2).all(|pair| pair[1].total < pair[0].total));
    assert!(by_blur[3].total > 0.8, "a blurred triangle is still one");
}
