//! Python's pickle as data: what it says is built from numbers, texts and containers, and nothing is ever called.
//!
//! A pickle is a program for a small stack machine, and two of its instructions call whatever Python function it names. Here the
//! reader knows the few names that numpy values are written with, and understands them as data; any other name is refused, with the name in
//! the message. Depth, size and work are bounded, so that a small hostile pickle cannot become a large value.

mod machine;
mod numpy;
mod reader;
mod writer;

pub use reader::read;
pub use writer::write;

/// A Python value.
#[derive(Clone, Debug, PartialEq)]
pub enum Pickled {
    /// `None`
    None,
    /// `True`, `False`
    Bool(bool),
    /// An integer; those beyond 64 bits are refused.
    Int(i64),
    /// A float.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes, and byte arrays.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Pickled>),
    /// A tuple.
    Tuple(Vec<Pickled>),
    /// A dictionary, in its order.
    Dict(Vec<(Pickled, Pickled)>),
    /// A numpy array of real numbers, flat; a numpy scalar is a number.
    Array {
        /// Its sizes.
        shape: Vec<usize>,
        /// Its values, the last index fastest.
        values: Vec<f64>,
    },
}

impl Pickled {
    /// The value of a dictionary's key.
    pub fn get(&self, key: &str) -> Option<&Self> {
        let Self::Dict(items) = self else { return None };
        items.iter().find(|(k, _)| matches!(k, Self::Str(k) if k == key)).map(|(_, value)| value)
    }

    /// One number: a number, or a container of one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Bool(value) => Some(f64::from(*value)),
            Self::Int(value) => Some(*value as f64),
            Self::Float(value) => Some(*value),
            Self::Array { values, .. } => <[f64; 1]>::try_from(values.as_slice()).ok().map(|[value]| value),
            Self::List(items) | Self::Tuple(items) => match items.as_slice() {
                [one] => one.number(),
                _ => None,
            },
            _ => None,
        }
    }

    /// Numbers: of a list or a tuple, or of an array along its only axis; NaN for what is not one number.
    pub fn numbers(&self) -> Option<Vec<f64>> {
        match self {
            Self::List(items) | Self::Tuple(items) => Some(items.iter().map(|item| item.number().unwrap_or(f64::NAN)).collect()),
            Self::Array { shape, values } if shape.first() == Some(&values.len()) => Some(values.clone()),
            _ => None,
        }
    }

    /// A value of JSON.
    pub fn from_json(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        match value {
            Value::Null => Self::None,
            Value::Bool(value) => Self::Bool(*value),
            Value::Number(number) => number.as_i64().map_or_else(|| Self::Float(number.as_f64().unwrap_or(f64::NAN)), Self::Int),
            Value::String(text) => Self::Str(text.clone()),
            Value::Array(items) => Self::List(items.iter().map(Self::from_json).collect()),
            Value::Object(items) => Self::Dict(items.iter().map(|(key, value)| (Self::Str(key.clone()), Self::from_json(value))).collect()),
        }
    }
}
