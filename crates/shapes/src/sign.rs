//! The second demo world: signs that say a word, for rewards that read.
//!
//! Shape legend: F frames, H height, W width.

use std::{fmt, str::FromStr};

use rand_chacha::rand_core::Rng;
use video::Frames;

use crate::glyph;
use crate::render::{BACKGROUND, RenderOptions, mix, uniform};

/// The letters of the words: ten capitals that text recognisers tell apart reliably at this size.
pub const LETTERS: [char; 10] = ['A', 'C', 'E', 'H', 'K', 'L', 'N', 'S', 'T', 'U'];

/// Letters of a word.
pub const WORD_LENGTH: usize = 3;

/// The RGB value of the writing.
const INK: [f32; 3] = [0.95, 0.92, 0.80];

/// Height of a letter, its width, the gap between letters, and half the width of a stroke, as shares of the frame's height.
const LETTER_HEIGHT: f32 = 0.5;
const LETTER_WIDTH: f32 = 0.33;
const LETTER_GAP: f32 = 0.19;
const STROKE_RADIUS: f32 = 0.04;

/// Space left around the word, as a share of the frame's height.
const MARGIN: f32 = 0.1;

/// One sentence of the world of signs: `a sign says "CAT"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sign {
    /// Places of the letters in [`LETTERS`].
    pub word: [usize; WORD_LENGTH],
}

/// Why a sentence is not a [`Sign`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{caption}` does not read `a sign says \"XYZ\"` with three letters out of {}", LETTERS.iter().collect::<String>())]
pub struct SignError {
    /// The sentence.
    pub caption: String,
}

impl fmt::Display for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word: String = self.word.iter().map(|&letter| LETTERS[letter]).collect();
        write!(f, "a sign says \"{word}\"")
    }
}

impl FromStr for Sign {
    type Err = SignError;

    fn from_str(caption: &str) -> Result<Self, SignError> {
        let error = || SignError { caption: caption.to_owned() };
        let quoted = caption.strip_prefix("a sign says \"").and_then(|rest| rest.strip_suffix('"')).ok_or_else(error)?;
        let places: Option<Vec<usize>> = quoted.chars().map(|c| LETTERS.iter().position(|&letter| letter == c)).collect();
        let word = places.and_then(|places| places.try_into().ok()).ok_or_else(error)?;
        Ok(Self { word })
    }
}

/// All 1000 signs, in the order of their words.
pub fn all_signs() -> Vec<Sign> {
    let count = LETTERS.len();
    (0..count.pow(WORD_LENGTH as u32)).map(|i| Sign { word: [i / count / count, i / count % count, i % count] }).collect()
}

/// The 100 signs kept for the evaluation of an alignment: those whose letters' places add up to a multiple of ten. So every pair of
/// letters at two places has exactly one word that is held out. (Pretraining sees all signs.)
pub fn held_out_signs() -> Vec<Sign> {
    all_signs().into_iter().filter(is_held_out).collect()
}

/// The 900 other signs, for the rollouts of an alignment.
pub fn train_signs() -> Vec<Sign> {
    all_signs().into_iter().filter(|sign| !is_held_out(sign)).collect()
}

fn is_held_out(sign: &Sign) -> bool {
    sign.word.iter().sum::<usize>().is_multiple_of(LETTERS.len())
}

/// Draws one clip of `sign`: its word in strokes on [`BACKGROUND`], fully in frame, gliding in a straight line at constant speed.
///
/// Start and end are drawn from `rng`, always four numbers, so the clip is a function of the generator's state.
///
/// # Panics
///
/// When a size in `options` is zero.
pub fn render_sign(sign: &Sign, rng: &mut impl Rng, options: &RenderOptions) -> Frames {
    let &RenderOptions { num_frames, height, width } = options;
    let [mut from, mut to] = [[0.0; 2]; 2];
    for end in [&mut from, &mut to] {
        *end = place(uniform(rng, (0.0, 1.0)), uniform(rng, (0.0, 1.0)), options);
    }
    let mut data = Vec::with_capacity(num_frames * height * width * 3);
    for index in 0..num_frames {
        let t = index as f32 / (num_frames.max(2) - 1) as f32;
        let left = from[0] + t * (to[0] - from[0]);
        let top = from[1] + t * (to[1] - from[1]);
        for row in 0..height {
            for column in 0..width {
                let coverage = coverage(sign, column as f32 + 0.5 - left, row as f32 + 0.5 - top, height as f32);
                data.extend(mix(BACKGROUND, INK, coverage));
            }
        }
    }
    Frames::new(num_frames, height, width, data).expect("sizes in `options` are not zero")
}

/// A corner (left, top) of the word such that it is in frame; shares in [0, 1] pick among those. The middle where none is.
fn place(share_x: f32, share_y: f32, options: &RenderOptions) -> [f32; 2] {
    let (height, width) = (options.height as f32, options.width as f32);
    let word_width = (WORD_LENGTH as f32 * (LETTER_WIDTH + LETTER_GAP) - LETTER_GAP) * height;
    let along = |share: f32, size: f32, extent: f32| {
        let free = size - extent - 2.0 * MARGIN * height;
        if free > 0.0 { MARGIN * height + share * free } else { (size - extent) / 2.0 }
    };
    [along(share_x, width, word_width), along(share_y, height, LETTER_HEIGHT * height)]
}

/// The share of a pixel covered by ink, anti-aliased; `(x, y)` is its centre seen from the word's corner, in pixels.
fn coverage(sign: &Sign, x: f32, y: f32, frame_height: f32) -> f32 {
    let advance = (LETTER_WIDTH + LETTER_GAP) * frame_height;
    let distance = sign.word.iter().enumerate().map(|(place, &letter)| {
        let size = [LETTER_WIDTH * frame_height, LETTER_HEIGHT * frame_height];
        glyph::distance(LETTERS[letter], x - place as f32 * advance, y, size)
    });
    let distance = distance.fold(f32::INFINITY, f32::min);
    (STROKE_RADIUS * frame_height + 0.5 - distance).clamp(0.0, 1.0)
}
