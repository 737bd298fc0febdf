//! Capital letters as strokes.

/// Strokes of a letter: each a chain of points (x, y), x in 0..=4 from left to right, y in 0..=6 from top to bottom.
fn strokes(letter: char) -> &'static [&'static [(f32, f32)]] {
    match letter {
        'A' => &[&[(0.0, 6.0), (2.0, 0.0), (4.0, 6.0)], &[(0.8, 4.0), (3.2, 4.0)]],
        'C' => &[&[(4.0, 1.0), (3.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, 5.0), (1.0, 6.0), (3.0, 6.0), (4.0, 5.0)]],
        'E' => &[&[(4.0, 0.0), (0.0, 0.0), (0.0, 6.0), (4.0, 6.0)], &[(0.0, 3.0), (3.2, 3.0)]],
        'H' => &[&[(0.0, 0.0), (0.0, 6.0)], &[(4.0, 0.0), (4.0, 6.0)], &[(0.0, 3.0), (4.0, 3.0)]],
        'K' => &[&[(0.0, 0.0), (0.0, 6.0)], &[(4.0, 0.0), (0.0, 3.6)], &[(1.3, 2.6), (4.0, 6.0)]],
        'L' => &[&[(0.0, 0.0), (0.0, 6.0), (4.0, 6.0)]],
        'N' => &[&[(0.0, 6.0), (0.0, 0.0), (4.0, 6.0), (4.0, 0.0)]],
        'S' => &[&[
            (4.0, 1.0),
            (3.0, 0.0),
            (1.0, 0.0),
            (0.0, 1.0),
            (0.0, 2.0),
            (1.0, 3.0),
            (3.0, 3.0),
            (4.0, 4.0),
            (4.0, 5.0),
            (3.0, 6.0),
            (1.0, 6.0),
            (0.0, 5.0),
        ]],
        'T' => &[&[(0.0, 0.0), (4.0, 0.0)], &[(2.0, 0.0), (2.0, 6.0)]],
        'U' => &[&[(0.0, 0.0), (0.0, 5.0), (1.0, 6.0), (3.0, 6.0), (4.0, 5.0), (4.0, 0.0)]],
        _ => &[],
    }
}

/// Distance of the point (x, y) to the middle of the letter's nearest stroke, in the unit of `size`, the letter's [width, height];
/// infinite for a character that is no letter of this world.
pub(crate) fn distance(letter: char, x: f32, y: f32, size: [f32; 2]) -> f32 {
    let at = |(column, row): (f32, f32)| (column / 4.0 * size[0], row / 6.0 * size[1]);
    let pieces = strokes(letter).iter().flat_map(|stroke| stroke.windows(2));
    pieces.map(|piece| to_segment((x, y), at(piece[0]), at(piece[1]))).fold(f32::INFINITY, f32::min)
}

/// Distance of `p` to the segment from `a` to `b`, which differ.
fn to_segment(p: (f32, f32), a: (f32, f32), b: (f32, f32)) -> f32 {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let along = (((p.0 - a.0) * dx + (p.1 - a.1) * dy) / (dx * dx + dy * dy)).clamp(0.0, 1.0);
    (p.0 - a.0 - along * dx).hypot(p.1 - a.1 - along * dy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_letter_has_strokes_inside_its_box() {
        for letter in crate::LETTERS {
            let points: Vec<_> = strokes(letter).iter().flat_map(|stroke| stroke.iter()).collect();
            assert!(points.len() >= 3, "{letter}");
            assert!(points.iter().all(|(x, y)| (0.0..=4.0).contains(x) && (0.0..=6.0).contains(y)), "{letter}");
        }
        assert_eq!(distance('?', 1.0, 1.0, [4.0, 6.0]), f32::INFINITY);
    }

    #[test]
    fn distances_are_those_of_the_strokes() {
        assert_eq!(distance('L', 0.0, 3.0, [4.0, 6.0]), 0.0);
        assert_eq!(distance('L', 2.0, 4.0, [4.0, 6.0]), 2.0);
        assert_eq!(distance('T', 4.0, 6.0, [8.0, 12.0]), 0.0, "scaled by its size");
    }
}
