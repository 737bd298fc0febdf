//! The demo worlds, small enough for a CPU and still real text-to-video tasks: coloured shapes that move, and signs that say a word ([`Sign`]).
//!
//! [`Caption`] says what happens ("a red circle moves right"), [`render`] draws it, and [`score`] is the verifier that tells how well a
//! clip shows a caption. The verifier is the reward of the default run, so it is graded (near misses earn something) and hard to fool.
//!
//! ```
//! use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
//! use shapes::{Caption, RenderOptions, render, score};
//!
//! let caption: Caption = "a red circle moves right".parse()?;
//! let clip = render(&caption, &mut ChaCha8Rng::seed_from_u64(1), &RenderOptions::default());
//! assert!(score(&clip, &caption).total > 0.95);
//! assert!(score(&clip, &"a blue square moves up".parse()?).total < 0.1);
//! # Ok::<(), shapes::CaptionError>(())
//! ```

mod caption;
mod geometry;
mod glyph;
mod observe;
mod render;
mod score;
mod sign;
mod world;

pub use caption::{Caption, CaptionError, Color, Motion, Shape, all_captions, held_out_captions, train_captions};
pub use render::{BACKGROUND, RenderOptions, render};
pub use score::{Score, score};
pub use sign::{LETTERS, Sign, SignError, WORD_LENGTH, all_signs, held_out_signs, render_sign, train_signs};
pub use world::{CaptionSet, Scene, Split, World};
