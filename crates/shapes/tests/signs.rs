//! The world of signs: its sentences, their split, and what a clip holds.

use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use shapes::{BACKGROUND, CaptionSet, LETTERS, RenderOptions, Sign, World, all_signs, held_out_signs, render_sign, train_signs};

const OPTIONS: RenderOptions = RenderOptions { num_frames: 5, height: 32, width: 64 };

#[test]
fn the_split_is_disjoint_complete_and_balanced() {
    let (all, train, held_out) = (all_signs(), train_signs(), held_out_signs());
    assert_eq!((all.len(), train.len(), held_out.len()), (1000, 900, 100));
    assert!(all.iter().all(|sign| train.contains(sign) != held_out.contains(sign)));
    for place in 0..3 {
        for letter in 0..LETTERS.len() {
            assert_eq!(held_out.iter().filter(|sign| sign.word[place] == letter).count(), 10, "{letter} at {place}");
        }
    }
}

#[test]
fn captions_read_back() {
    for sign in all_signs() {
        assert_eq!(sign.to_string().parse(), Ok(sign));
    }
    assert_eq!(Sign { word: [1, 0, 8] }.to_string(), "a sign says \"CAT\"");
    for wrong in ["", "a sign says CAT", "a sign says \"CA\"", "a sign says \"CATS\"", "a sign says \"DOG\"", "a sign says \"cat\""] {
        assert!(wrong.parse::<Sign>().is_err(), "{wrong}");
    }
}

#[test]
fn recipes_name_captions_by_world_and_split() {
    let set: CaptionSet = "signs:held-out".parse().expect("known");
    assert_eq!((set.world, set.texts().len()), (World::Signs, 100));
    assert_eq!("shapes:train".parse::<CaptionSet>().expect("known").texts().len(), 54);
    assert!("signs:test".parse::<CaptionSet>().is_err_and(|e| e.contains("`signs:held-out`")));
}

proptest! {
    /// The outermost pixels are background in every frame, so the word is whole; and there is ink.
    #[test]
    fn words_are_whole_and_move_smoothly(index in 0usize..1000, seed in any::<u64>()) {
        let sign = all_signs()[index];
        let clip = render_sign(&sign, &mut ChaCha8Rng::seed_from_u64(seed), &OPTIONS);
        let mut ink = Vec::new();
        for f in 0..5 {
            let frame = clip.frame(f);
            let at = |row: usize, column: usize| &frame[(row * 64 + column) * 3..][..3];
            for column in 0..64 {
                prop_assert_eq!(at(0, column), &BACKGROUND[..]);
                prop_assert_eq!(at(31, column), &BACKGROUND[..]);
            }
            for row in 0..32 {
                prop_assert_eq!(at(row, 0), &BACKGROUND[..]);
                prop_assert_eq!(at(row, 63), &BACKGROUND[..]);
            }
            ink.push(frame.iter().map(|v| f64::from(v - BACKGROUND[0])).sum::<f64>());
        }
        // moving changes where the ink is, hardly how much there is
        prop_assert!(ink.iter().all(|&i| i > 100.0 && (i / ink[0] - 1.0).abs() < 0.05), "{ink:?}");
    }

    #[test]
    fn clips_are_a_function_of_the_generator(index in 0usize..1000, seed in any::<u64>()) {
        let sign = all_signs()[index];
        let draw = || render_sign(&sign, &mut ChaCha8Rng::seed_from_u64(seed), &OPTIONS);
        let (first, second) = (draw(), draw());
        prop_assert_eq!(first.data(), second.data());
    }
}
