//! What a clip shows, in words.

use std::{fmt, str::FromStr};

/// One sentence of the demo world: "a red circle moves right".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Caption {
    /// The colour of the object.
    pub color: Color,
    /// The outline of the object.
    pub shape: Shape,
    /// Where the object goes.
    pub motion: Motion,
}

/// Why a sentence is not a [`Caption`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaptionError {
    /// The words are not in the one order the world knows.
    #[error("`{caption}` does not read `a <color> <shape> moves <direction>`")]
    Form {
        /// The sentence.
        caption: String,
    },
    /// A word stands in the right place but the world does not know it.
    #[error("unknown {attribute} `{word}` (expected one of: {expected})")]
    Word {
        /// `color`, `shape` or `motion`.
        attribute: &'static str,
        /// The word found.
        word: String,
        /// The words known there.
        expected: String,
    },
}

/// Declares an attribute: a closed set of values, each with its word.
macro_rules! attribute {
    ($(#[$doc:meta])* $name:ident, $attribute:literal { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// Every value, in a fixed order.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$variant),+];

            /// The word used in captions.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }

            /// The position in [`ALL`](Self::ALL).
            pub const fn index(self) -> usize {
                self as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }

        impl FromStr for $name {
            type Err = CaptionError;

            fn from_str(word: &str) -> Result<Self, CaptionError> {
                Self::ALL.into_iter().find(|value| value.word() == word).ok_or_else(|| CaptionError::Word {
                    attribute: $attribute,
                    word: word.to_owned(),
                    expected: Self::ALL.map(Self::word).join(", "),
                })
            }
        }
    };
}

attribute! {
    /// The colour of the object. The six are spread around the hue circle, so that none is a shade of another.
    Color, "color" {
        /// Red.
        Red = "red",
        /// Green.
        Green = "green",
        /// Blue.
        Blue = "blue",
        /// Yellow.
        Yellow = "yellow",
        /// Purple.
        Purple = "purple",
        /// Cyan.
        Cyan = "cyan",
    }
}

attribute! {
    /// The outline of the object. The three are drawn with equal area, so that size does not give the shape away.
    Shape, "shape" {
        /// A circle.
        Circle = "circle",
        /// A square with horizontal and vertical sides.
        Square = "square",
        /// An equilateral triangle pointing up.
        Triangle = "triangle",
    }
}

attribute! {
    /// Where the object goes, at constant speed.
    Motion, "motion" {
        /// Towards smaller x.
        Left = "left",
        /// Towards larger x.
        Right = "right",
        /// Towards smaller y: rows count downwards.
        Up = "up",
        /// Towards larger y.
        Down = "down",
    }
}

impl Color {
    /// The RGB value an ideal object has, in [0, 1].
    pub const fn rgb(self) -> [f32; 3] {
        match self {
            Self::Red => [0.90, 0.12, 0.12],
            Self::Green => [0.12, 0.80, 0.16],
            Self::Blue => [0.15, 0.25, 0.95],
            Self::Yellow => [0.95, 0.88, 0.12],
            Self::Purple => [0.75, 0.15, 0.92],
            Self::Cyan => [0.10, 0.85, 0.90],
        }
    }
}

impl Motion {
    /// The unit vector (x, y) of the motion; y grows downwards.
    pub const fn direction(self) -> (f32, f32) {
        match self {
            Self::Left => (-1.0, 0.0),
            Self::Right => (1.0, 0.0),
            Self::Up => (0.0, -1.0),
            Self::Down => (0.0, 1.0),
        }
    }
}

impl fmt::Display for Caption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a {} {} moves {}", self.color, self.shape, self.motion)
    }
}

impl FromStr for Caption {
    type Err = CaptionError;

    /// Parses "a red circle moves right"; white space around and between the words is free.
    fn from_str(caption: &str) -> Result<Self, CaptionError> {
        let words: Vec<&str> = caption.split_whitespace().collect();
        let ["a", color, shape, "moves", motion] = words[..] else {
            return Err(CaptionError::Form { caption: caption.to_owned() });
        };
        Ok(Self { color: color.parse()?, shape: shape.parse()?, motion: motion.parse()? })
    }
}

/// All 72 captions: colours outermost, then shapes, then motions.
pub fn all_captions() -> Vec<Caption> {
    let mut captions = Vec::with_capacity(Color::ALL.len() * Shape::ALL.len() * Motion::ALL.len());
    for color in Color::ALL {
        for shape in Shape::ALL {
            captions.extend(Motion::ALL.map(|motion| Caption { color, shape, motion }));
        }
    }
    captions
}

/// The 54 captions for the rollouts of an alignment: those that are not [held out](held_out_captions).
pub fn train_captions() -> Vec<Caption> {
    all_captions().into_iter().filter(|caption| !is_held_out(caption)).collect()
}

/// The 18 captions kept for the evaluation of an alignment: every word of them occurs in its rollouts, these combinations do not.
/// (Pretraining sees all 72, as a base model has seen everything.)
///
/// The rule is a Latin square on the indices: a caption is held out when `motion = (color + shape) mod 4`. So every pair of colour and
/// shape misses exactly one motion; each colour is held out 3 times, each shape 6 times, each motion 4 or 5 times.
pub fn held_out_captions() -> Vec<Caption> {
    all_captions().into_iter().filter(is_held_out).collect()
}

fn is_held_out(caption: &Caption) -> bool {
    caption.motion.index() == (caption.color.index() + caption.shape.index()) % Motion::ALL.len()
}
