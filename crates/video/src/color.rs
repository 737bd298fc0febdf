//! Tells players which colours an H.264 stream has. The encoder does not, and what players guess depends on the size.

/// The first three bytes of the code that starts a unit.
const START: [u8; 3] = [0, 0, 1];

/// Type of the unit that holds the sequence parameter set.
const SEQUENCE_PARAMETERS: u8 = 7;

/// The Annex B stream with sequence parameter sets that name BT.709, limited range (ITU-T H.264, annex E).
pub(crate) fn name_bt709(stream: &[u8]) -> Vec<u8> {
    let starts: Vec<usize> = (0..stream.len().saturating_sub(2)).filter(|&at| stream[at..at + 3] == START).collect();
    let mut named = stream[..starts.first().copied().unwrap_or(stream.len())].to_vec();
    for (i, &start) in starts.iter().enumerate() {
        let unit = &stream[start + 3..starts.get(i + 1).copied().unwrap_or(stream.len())];
        named.extend(START);
        match unit.first() {
            Some(header) if header & 0x1f == SEQUENCE_PARAMETERS => named.extend(with_usability(unit)),
            _ => named.extend(unit),
        }
    }
    named
}

/// A sequence parameter set whose last field, `vui_parameters_present_flag`, is 0, with that flag set and its fields written.
fn with_usability(unit: &[u8]) -> Vec<u8> {
    let trailing = unit.iter().rev().take_while(|&&byte| byte == 0).count();
    let (unit, zeros) = unit.split_at(unit.len() - trailing);
    let mut bits: Vec<bool> = unescape(unit).iter().flat_map(|byte| (0..8).map(move |i| byte >> (7 - i) & 1 == 1)).collect();
    while bits.pop() == Some(false) {} // the padding, and the stop bit
    bits.pop(); // the flag
    // (value, bits): the flag; no aspect ratio, no overscan; a signal type: format unspecified, limited range, colours given,
    // primaries, transfer and matrix of BT.709; no chroma location, timing, buffering (2), picture structure, restrictions; the stop bit
    let fields = [(1, 1), (0, 2), (1, 1), (5, 3), (0, 1), (1, 1), (1, 8), (1, 8), (1, 8), (0, 6), (1, 1)];
    bits.extend(fields.into_iter().flat_map(|(value, count)| (0..count).map(move |i| value >> (count - 1 - i) & 1 == 1)));
    let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (i, &bit)| byte | u8::from(bit) << (7 - i));
    let bytes: Vec<u8> = bits.chunks(8).map(byte).collect();
    [escape(&bytes), zeros.to_vec()].concat()
}

/// Removes the bytes that keep a unit free of start codes (clause 7.4.1.1).
fn unescape(unit: &[u8]) -> Vec<u8> {
    let inserted = |at: usize| unit[at] == 3 && at >= 2 && unit[at - 2..at] == [0, 0];
    (0..unit.len()).filter(|&at| !inserted(at)).map(|at| unit[at]).collect()
}

fn escape(bytes: &[u8]) -> Vec<u8> {
    let mut unit = Vec::new();
    for &byte in bytes {
        if byte <= 3 && unit.ends_with(&[0, 0]) {
            unit.push(3);
        }
        unit.push(byte);
    }
    unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_parameter_set_changes() {
        let rest = [0, 0, 1, 0x68, 0xce, 0x38, 0, 0, 0, 1, 0x65, 0x88];
        // baseline, level 4.0, 64 x 64: ..., no cropping, no usability information, stop bit
        let stream = [&[0, 0, 0, 1, 0x67, 0x42, 0xc0, 0x28, 0xf4, 0x21, 0x09][..], &rest].concat();
        let named = name_bt709(&stream);
        assert!(named.starts_with(&stream[..8]) && named.ends_with(&rest), "{named:x?}");
        assert_eq!(named.len() - stream.len(), 5, "37 bits more");
        // 0010 0001 0000 1001 ends with the flag and the stop bit; 1 00 1 101 0 1, three times 00000001, 000000 1 follow instead
        let set = &named[8..named.len() - rest.len()];
        assert_eq!(set, [0xf4, 0x21, 0x0a, 0x6a, 0x02, 0x02, 0x02, 0x04]);
    }

    #[test]
    fn escaping_is_undone() {
        for bytes in [vec![0, 0, 1, 0, 0, 3, 9], vec![0, 0, 0, 0, 0, 2], vec![7, 1, 2, 0, 1]] {
            let unit = escape(&bytes);
            assert!(!unit.windows(3).any(|window| window == START), "{unit:?}");
            assert_eq!(unescape(&unit), bytes);
        }
    }
}
