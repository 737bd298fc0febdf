//! Writes pickles of protocol 4, which every Python 3 reads.

use super::Pickled;

/// The pickle of a value. Arrays become nested lists: the reader's side needs no numpy.
pub fn write(value: &Pickled) -> Vec<u8> {
    let mut out = vec![0x80, 4];
    put(&mut out, value);
    out.push(b'.');
    out
}

fn put(out: &mut Vec<u8>, value: &Pickled) {
    match value {
        Pickled::None => out.push(b'N'),
        Pickled::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
        Pickled::Int(value) => {
            out.extend([0x8a, 8]);
            out.extend(value.to_le_bytes());
        }
        Pickled::Float(value) => {
            out.push(b'G');
            out.extend(value.to_be_bytes());
        }
        Pickled::Str(text) => {
            out.push(0x8d);
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        }
        Pickled::Bytes(bytes) => {
            out.push(0x8e);
            out.extend((bytes.len() as u64).to_le_bytes());
            out.extend(bytes);
        }
        Pickled::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| put(out, item));
            out.push(b'e');
        }
        Pickled::Tuple(items) => {
            out.push(b'(');
            items.iter().for_each(|item| put(out, item));
            out.push(b't');
        }
        Pickled::Dict(items) => {
            out.extend(b"}(");
            items.iter().for_each(|(key, value)| {
                put(out, key);
                put(out, value);
            });
            out.push(b'u');
        }
        Pickled::Array { shape, values } => put_array(out, shape, values),
    }
}

fn put_array(out: &mut Vec<u8>, shape: &[usize], values: &[f64]) {
    let Some((&count, rest)) = shape.split_first() else {
        return put(out, &Pickled::Float(values.first().copied().unwrap_or(f64::NAN)));
    };
    out.extend(b"](");
    let size = values.len().checked_div(count).unwrap_or(0).max(1);
    values.chunks(size).for_each(|values| put_array(out, rest, values));
    out.push(b'e');
}
