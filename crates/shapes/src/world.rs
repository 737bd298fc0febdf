//! The two demo worlds under one name, for whoever takes either: prompts, pretraining.

use std::{fmt, str::FromStr};

use rand_chacha::rand_core::Rng;
use video::Frames;

use crate::sign::{self, LETTERS, Sign, WORD_LENGTH};
use crate::{Caption, RenderOptions, all_captions, caption, render};

/// A demo world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum World {
    /// Coloured shapes that move: [`Caption`].
    #[default]
    Shapes,
    /// Signs that say a word: [`Sign`].
    Signs,
}

/// Which captions of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Those for the rollouts of an alignment.
    Train,
    /// Those kept for its evaluation.
    HeldOut,
}

/// What a clip of a world shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scene {
    /// Of [`World::Shapes`].
    Shapes(Caption),
    /// Of [`World::Signs`].
    Signs(Sign),
}

impl World {
    /// Both, in a fixed order.
    pub const ALL: [Self; 2] = [Self::Shapes, Self::Signs];

    /// Its name in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shapes => "shapes",
            Self::Signs => "signs",
        }
    }

    /// Everything it can show, in a fixed order.
    pub fn scenes(self) -> Vec<Scene> {
        match self {
            Self::Shapes => all_captions().into_iter().map(Scene::Shapes).collect(),
            Self::Signs => sign::all_signs().into_iter().map(Scene::Signs).collect(),
        }
    }

    /// The words a tokenizer needs to know whole; the rest is spelled.
    pub fn vocabulary(self) -> Vec<String> {
        match self {
            Self::Shapes => all_captions().iter().flat_map(|c| c.to_string().split(' ').map(str::to_owned).collect::<Vec<_>>()).collect(),
            Self::Signs => ["a", "sign", "says"].map(str::to_owned).to_vec(),
        }
    }
}

impl Scene {
    /// Draws one clip of it; see [`render`] and [`render_sign`](crate::render_sign).
    ///
    /// # Panics
    ///
    /// When a size in `options` is zero.
    pub fn render(&self, rng: &mut impl Rng, options: &RenderOptions) -> Frames {
        match self {
            Self::Shapes(caption) => render(caption, rng, options),
            Self::Signs(sign) => sign::render_sign(sign, rng, options),
        }
    }

    /// Number of its parts that [`take_from`](Self::take_from) can exchange: words of a caption, letters of a sign.
    pub const fn parts(&self) -> usize {
        match self {
            Self::Shapes(_) => 3,
            Self::Signs(_) => WORD_LENGTH,
        }
    }

    /// The same with part number `part` as `other` has it; unchanged if that is of the other world, or there is no such part.
    pub fn take_from(&mut self, other: &Self, part: usize) {
        match (self, other) {
            (Self::Shapes(own), Self::Shapes(other)) => match part {
                0 => own.color = other.color,
                1 => own.shape = other.shape,
                2 => own.motion = other.motion,
                _ => {}
            },
            (Self::Signs(own), Self::Signs(other)) if part < WORD_LENGTH => own.word[part] = other.word[part],
            _ => {}
        }
    }
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shapes(caption) => caption.fmt(f),
            Self::Signs(sign) => sign.fmt(f),
        }
    }
}

impl Split {
    /// Its name in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
        }
    }
}

/// Captions that a recipe can name: `shapes:train`, `shapes:held-out`, `signs:train` or `signs:held-out`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptionSet {
    /// The world.
    pub world: World,
    /// Which of its captions.
    pub split: Split,
}

impl CaptionSet {
    /// The captions.
    pub fn texts(self) -> Vec<String> {
        fn texts<T: fmt::Display>(captions: &[T]) -> Vec<String> {
            captions.iter().map(ToString::to_string).collect()
        }
        match (self.world, self.split) {
            (World::Shapes, Split::Train) => texts(&caption::train_captions()),
            (World::Shapes, Split::HeldOut) => texts(&caption::held_out_captions()),
            (World::Signs, Split::Train) => texts(&sign::train_signs()),
            (World::Signs, Split::HeldOut) => texts(&sign::held_out_signs()),
        }
    }
}

impl fmt::Display for CaptionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.world.name(), self.split.name())
    }
}

impl FromStr for CaptionSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = World::ALL.into_iter().flat_map(|world| [Split::Train, Split::HeldOut].map(|split| Self { world, split }));
        all.find(|set| set.to_string() == text).ok_or_else(|| {
            format!("unknown variant `{text}`, expected `shapes:train`, `shapes:held-out`, `signs:train` or `signs:held-out`")
        })
    }
}

const _: () = assert!(LETTERS.len() == 10, "the rule for held-out signs is made for ten letters");
