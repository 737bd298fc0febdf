//! The sentences of the demo world, their split, and the range of scores.

mod common;

use proptest::prelude::*;
use shapes::{BACKGROUND, Caption, Color, Motion, RenderOptions, Shape, all_captions, held_out_captions, render, score, train_captions};
use video::Frames;

#[test]
fn the_split_is_disjoint_complete_and_balanced() {
    let (all, train, held_out) = (all_captions(), train_captions(), held_out_captions());
    assert_eq!((all.len(), train.len(), held_out.len()), (72, 54, 18));
    assert!(all.iter().all(|caption| train.contains(caption) != held_out.contains(caption)));
}

#[test]
fn every_attribute_is_held_out_equally_often() {
    let (train, held_out) = (train_captions(), held_out_captions());
    for color in Color::ALL {
        assert_eq!(held_out.iter().filter(|caption| caption.color == color).count(), 3);
    }
    for shape in Shape::ALL {
        assert_eq!(held_out.iter().filter(|caption| caption.shape == shape).count(), 6);
    }
    for motion in Motion::ALL {
        let count = held_out.iter().filter(|caption| caption.motion == motion).count();
        assert!((4..=5).contains(&count), "{motion}: {count}");
    }
    for (color, shape) in Color::ALL.into_iter().flat_map(|color| Shape::ALL.map(|shape| (color, shape))) {
        let same = |caption: &&Caption| caption.color == color && caption.shape == shape;
        assert_eq!((train.iter().filter(same).count(), held_out.iter().filter(same).count()), (3, 1));
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let message = |text: &str| text.parse::<Caption>().expect_err("not a caption").to_string();
    assert_eq!(message("a rod circle moves right"), "unknown color `rod` (expected one of: red, green, blue, yellow, purple, cyan)");
    assert_eq!(message("a red cube moves right"), "unknown shape `cube` (expected one of: circle, square, triangle)");
    assert_eq!(message("a red circle moves away"), "unknown motion `away` (expected one of: left, right, up, down)");
    let form = "does not read `a <color> <shape> moves <direction>`";
    assert_eq!(message("a red circle"), format!("`a red circle` {form}"));
    assert_eq!(message(""), format!("`` {form}"));
}

#[test]
fn a_clip_is_a_function_of_caption_and_seed() {
    let caption = all_captions()[7];
    assert_eq!(common::clip(&caption, 3), common::clip(&caption, 3));
    assert_ne!(common::clip(&caption, 3), common::clip(&caption, 4));
}

#[test]
fn objects_stay_in_frame() {
    for (num_frames, height, width) in [(9, 64, 64), (9, 48, 80), (5, 60, 32)] {
        for (seed, caption) in all_captions().into_iter().enumerate() {
            let options = RenderOptions { num_frames, height, width };
            let frames = render(&caption, &mut common::rng(seed as u64), &options);
            let ink = |f| -> f32 { frames.frame(f).iter().map(|value| (value - BACKGROUND[0]).abs()).sum() };
            let first = ink(0);
            for f in 1..num_frames {
                assert!((ink(f) / first - 1.0).abs() < 0.02, "{caption}: {} then {first}", ink(f));
            }
        }
    }
}

fn captions() -> impl Strategy<Value = Caption> {
    prop::sample::select(all_captions())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn captions_round_trip(caption in captions(), spaces in "[ \\t\n]{1,3}") {
        prop_assert_eq!(caption.to_string().parse::<Caption>(), Ok(caption));
        prop_assert_eq!(caption.to_string().replace(' ', &spaces).parse::<Caption>(), Ok(caption));
    }

    #[test]
    fn parsing_never_panics(text in ".{0,40}") {
        if let Ok(caption) = text.parse::<Caption>() {
            prop_assert_eq!(caption.to_string(), text.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }

    #[test]
    fn scores_stay_in_range(
        caption in captions(),
        (num_frames, height, width) in (1usize..4, 1usize..12, 1usize..12),
        values in prop::collection::vec(prop_oneof![any::<f32>(), 0.0f32..1.0], 4 * 12 * 12 * 3),
    ) {
        let data = values[..num_frames * height * width * 3].to_vec();
        let frames = Frames::new(num_frames, height, width, data).expect("sizes agree");
        let score = score(&frames, &caption);
        for value in [score.total, score.color, score.shape, score.motion, score.object] {
            prop_assert!((0.0..=1.0).contains(&value), "{score:?}");
        }
    }

    #[test]
    fn true_clips_score_in_range_at_any_size(caption in captions(), num_frames in 1usize..6, height in 1usize..40, width in 1usize..40) {
        let options = RenderOptions { num_frames, height, width };
        let score = score(&render(&caption, &mut common::rng(0), &options), &caption);
        prop_assert!((0.0..=1.0).contains(&score.total), "{score:?}");
    }
}
