//! The names that numpy values are written with, understood as data.

use super::Pickled;
use super::machine::{Id, Machine, Node};

/// A name that may be in a pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// `numpy.dtype(text, False, True)`
    Dtype,
    /// `numpy.ndarray`, which is only ever given to [`Known::Reconstruct`].
    Ndarray,
    /// `_reconstruct(ndarray, (0,), b"b")`: an array before its state.
    Reconstruct,
    /// `scalar(dtype, bytes)`
    Scalar,
    /// `_frombuffer(bytes, dtype, shape, order)`, from protocol 5 on.
    FromBuffer,
    /// `_codecs.encode(text, "latin1")`: bytes, up to protocol 2.
    Encode,
}

impl Known {
    pub fn named(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("numpy", "dtype") => Self::Dtype,
            ("numpy", "ndarray") => Self::Ndarray,
            ("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct") => Self::Reconstruct,
            ("numpy._core.multiarray" | "numpy.core.multiarray", "scalar") => Self::Scalar,
            ("numpy._core.numeric" | "numpy.core.numeric", "_frombuffer") => Self::FromBuffer,
            ("_codecs", "encode") => Self::Encode,
            _ => return None,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Dtype => "numpy.dtype",
            Self::Ndarray => "numpy.ndarray",
            Self::Reconstruct => "_reconstruct",
            Self::Scalar => "scalar",
            Self::FromBuffer => "_frombuffer",
            Self::Encode => "_codecs.encode",
        }
    }
}

/// A type of real numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dtype {
    kind: u8,
    size: usize,
    big_endian: bool,
}

/// What a known name makes of its arguments.
pub(super) fn construct(machine: &Machine, known: Known, arguments: Id) -> Result<Node, String> {
    let Node::Tuple(arguments) = machine.node(arguments) else { return Err("it calls with what are no arguments".to_owned()) };
    let nodes: Vec<&Node> = arguments.iter().map(|&id| machine.node(id)).collect();
    let unusual = || format!("`{}` has arguments that numpy does not write", known.name());
    match (known, &nodes[..]) {
        (Known::Dtype, [Node::Leaf(Pickled::Str(text)), ..]) => dtype(text).map(Node::Dtype),
        (Known::Reconstruct, [Node::Known(Known::Ndarray), Node::Tuple(_), Node::Leaf(_)]) => Ok(Node::EmptyArray),
        (Known::Scalar, [Node::Dtype(dtype), Node::Leaf(Pickled::Bytes(bytes))]) => scalar(*dtype, bytes),
        (
            Known::FromBuffer,
            [Node::Leaf(Pickled::Bytes(bytes)), Node::Dtype(dtype), Node::Tuple(shape), Node::Leaf(Pickled::Str(order))],
        ) => array(*dtype, bytes, &sizes(machine, shape)?, order == "F"),
        (Known::Encode, [Node::Leaf(Pickled::Str(text)), Node::Leaf(Pickled::Str(codec))]) if codec == "latin1" => {
            let byte = |c: char| u8::try_from(u32::from(c)).map_err(|_| "a text is not latin1".to_owned());
            Ok(Node::Leaf(Pickled::Bytes(text.chars().map(byte).collect::<Result<_, _>>()?)))
        }
        _ => Err(unusual()),
    }
}

/// A type or an array with its state.
pub(super) fn set_state(machine: &Machine, target: Id, state: Id) -> Result<Node, String> {
    let Node::Tuple(state) = machine.node(state) else { return Err("it sets the state of something to what is no tuple".to_owned()) };
    let nodes: Vec<&Node> = state.iter().map(|&id| machine.node(id)).collect();
    match (machine.node(target), &nodes[..]) {
        (Node::Dtype(dtype), [_, Node::Leaf(Pickled::Str(order)), Node::Leaf(Pickled::None), ..]) => {
            Ok(Node::Dtype(Dtype { big_endian: order == ">", ..*dtype }))
        }
        (
            Node::EmptyArray,
            [_, Node::Tuple(shape), Node::Dtype(dtype), Node::Leaf(Pickled::Bool(fortran)), Node::Leaf(Pickled::Bytes(bytes))],
        ) => array(*dtype, bytes, &sizes(machine, shape)?, *fortran),
        _ => Err("it sets the state of something that is no numpy value of numbers".to_owned()),
    }
}

fn dtype(text: &str) -> Result<Dtype, String> {
    let known = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"];
    match text.as_bytes() {
        &[kind, size] if known.contains(&text) => Ok(Dtype { kind, size: usize::from(size - b'0'), big_endian: false }),
        _ => Err(format!("the numpy type `{}` is not one of real numbers", text.chars().take(20).collect::<String>())),
    }
}

fn scalar(dtype: Dtype, bytes: &[u8]) -> Result<Node, String> {
    match values(dtype, bytes)[..] {
        [value] if bytes.len() == dtype.size => Ok(Node::Leaf(match dtype.kind {
            b'b' => Pickled::Bool(value != 0.0),
            b'f' => Pickled::Float(value),
            _ => Pickled::Int(value as i64),
        })),
        _ => Err(format!("a numpy number of {} bytes has {}", dtype.size, bytes.len())),
    }
}

fn sizes(machine: &Machine, shape: &[Id]) -> Result<Vec<usize>, String> {
    let size = |&id: &Id| match machine.node(id) {
        Node::Leaf(Pickled::Int(size)) => usize::try_from(*size).ok(),
        _ => None,
    };
    let sizes: Option<Vec<usize>> = if shape.len() > 32 { None } else { shape.iter().map(size).collect() };
    sizes.ok_or_else(|| "an array has sizes that numpy does not write".to_owned())
}

fn array(dtype: Dtype, bytes: &[u8], shape: &[usize], fortran: bool) -> Result<Node, String> {
    let count = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    if count.and_then(|n| n.checked_mul(dtype.size)) != Some(bytes.len()) {
        return Err(format!("an array of sizes {shape:?} has {} bytes", bytes.len()));
    }
    // An answer is a few thousand numbers; a byte becomes eight.
    if bytes.len() / dtype.size > 1 << 20 {
        return Err("an array has more numbers than an answer can have".to_owned());
    }
    let flat = values(dtype, bytes);
    let values = if fortran { in_c_order(&flat, shape) } else { flat };
    Ok(Node::Leaf(Pickled::Array { shape: shape.to_vec(), values }))
}

/// Values with the first index fastest as values with the last one fastest.
fn in_c_order(values: &[f64], shape: &[usize]) -> Vec<f64> {
    let place = |mut index: usize| {
        let mut at = 0;
        let mut strides: usize = values.len();
        for &size in shape.iter().rev() {
            strides /= size.max(1);
            at += index % size.max(1) * strides;
            index /= size.max(1);
        }
        at
    };
    (0..values.len()).map(|index| values[place(index)]).collect()
}

fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let value = |bytes: &[u8]| {
        let mut whole = [0u8; 8];
        // Little end first, at the start.
        bytes.iter().take(8).enumerate().for_each(|(i, &byte)| whole[if dtype.big_endian { bytes.len() - 1 - i } else { i }] = byte);
        let bits = u64::from_le_bytes(whole);
        match (dtype.kind, dtype.size) {
            (b'f', 8) => f64::from_bits(bits),
            (b'f', 4) => f64::from(f32::from_bits(bits as u32)),
            (b'f', _) => half(bits as u16),
            // Moved to the top and back, so that the sign is carried along.
            (b'i', size) => ((bits << (64 - 8 * size)) as i64 >> (64 - 8 * size)) as f64,
            _ => bits as f64,
        }
    };
    bytes.chunks_exact(dtype.size).map(value).collect()
}

/// A float of 16 bits: sign, 5 bits of exponent, 10 of fraction.
fn half(bits: u16) -> f64 {
    let (sign, exponent, fraction) = (if bits >> 15 == 0 { 1.0 } else { -1.0 }, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_decoded() {
        let of = |text: &str, bytes: &[u8]| values(dtype(text).expect("known"), bytes);
        assert_eq!(of("f2", &[0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00]), [1.0, -2.0, 2f64.powi(-24)]);
        assert_eq!(of("i2", &[0xff, 0xff, 0x01, 0x00]), [-1.0, 1.0]);
        assert_eq!(of("u1", &[255, 1]), [255.0, 1.0]);
        let big = Dtype { big_endian: true, ..dtype("i4").expect("known") };
        assert_eq!(values(big, &[0xff, 0xff, 0xff, 0xfe]), [-2.0]);
    }

    #[test]
    fn columns_become_rows() {
        // [[1, 2, 3], [4, 5, 6]] by columns is 1 4 2 5 3 6.
        assert_eq!(in_c_order(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0], &[2, 3]), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }
}
