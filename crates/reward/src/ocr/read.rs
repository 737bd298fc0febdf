//! Reading a line: pictures in, one distribution over the alphabet for every few columns out.

use super::Reading;
use crate::onnx::picture::{Normalisation, Picture, Resampling};
use crate::onnx::{Array, Session};

/// Rows of the picture that the network takes.
const HEIGHT: usize = 48;

/// What the network was trained with: values in [-1, 1], blue first.
const NORMALISATION: Normalisation = Normalisation { mean: [0.5; 3], std: [0.5; 3], bgr: true };

/// Pictures computed at once.
const BATCH: usize = 16;

/// A line is never stretched to more columns: what is wider is squeezed.
const MAX_WIDTH: usize = 3200;

/// A text recogniser and its alphabet.
pub(super) struct Recogniser {
    session: Session,
    /// The text of class `i + 1`; class 0 is the blank of the connectionist decoding.
    alphabet: Vec<String>,
}

impl Recogniser {
    /// `None` if the network does not say its alphabet, one character a line. A blank follows as the last.
    pub(super) fn new(session: Session) -> Option<Self> {
        let characters = session.metadata("character")?;
        let alphabet = characters.lines().map(str::to_owned).chain([" ".to_owned()]).collect();
        Some(Self { session, alphabet })
    }

    /// Reads each picture as one line. Neighbours of the same size are computed at once.
    pub(super) fn read(&self, lines: &[Picture]) -> Result<Vec<Reading>, String> {
        let same_size = |a: &Picture, b: &Picture| (a.width, a.height) == (b.width, b.height);
        let batches = lines.chunk_by(same_size).flat_map(|alike| alike.chunks(BATCH));
        Ok(batches.map(|batch| self.read_batch(batch)).collect::<Result<Vec<_>, _>>()?.concat())
    }

    fn read_batch(&self, lines: &[Picture]) -> Result<Vec<Reading>, String> {
        let Some(first) = lines.first() else { return Ok(Vec::new()) };
        let width = (HEIGHT as f64 * first.width as f64 / first.height.max(1) as f64).round() as usize;
        let width = width.clamp(HEIGHT / 3, MAX_WIDTH);
        let mut values = Vec::with_capacity(lines.len() * 3 * HEIGHT * width);
        for line in lines {
            line.resize(width, HEIGHT, Resampling::Bilinear)?.write(&NORMALISATION, &mut values);
        }
        let output = self.session.run(Array { values, shape: vec![lines.len(), 3, HEIGHT, width] })?;
        let &[count, steps, classes] = output.shape.as_slice() else {
            return Err(format!("the recogniser's output has the shape {:?}, expected [lines, steps, characters]", output.shape));
        };
        if count != lines.len() || classes != self.alphabet.len() + 1 || output.values.len() != count * steps * classes {
            return Err(format!(
                "the recogniser's output has the shape {:?} for {} lines and {} characters",
                output.shape,
                lines.len(),
                self.alphabet.len()
            ));
        }
        Ok(output.values.chunks(steps.max(1) * classes).map(|line| self.decode(line)).collect())
    }

    fn decode(&self, line: &[f32]) -> Reading {
        let kept = collapse(line, self.alphabet.len() + 1);
        let text = kept.iter().map(|&(class, _)| self.alphabet[class - 1].as_str()).collect();
        let confidence = kept.iter().map(|(_, p)| f64::from(*p)).sum::<f64>() / kept.len().max(1) as f64;
        Reading { text, confidence }
    }
}

/// The likeliest class of every step, with its probability; repetitions count once, and class 0 not at all (Graves et al. 2006).
fn collapse(line: &[f32], classes: usize) -> Vec<(usize, f32)> {
    let best =
        |step: &[f32]| step.iter().copied().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, p)| if p > best.1 { (i, p) } else { best });
    let mut last = 0;
    let mut kept = Vec::new();
    for (class, probability) in line.chunks_exact(classes).map(best) {
        if class != last && class != 0 {
            kept.push((class, probability));
        }
        last = class;
    }
    kept
}

#[cfg(test)]
mod tests {
    #[test]
    fn repetitions_collapse_and_blanks_separate() {
        let step = |class: usize| [0.1f32, 0.1, 0.1].iter().enumerate().map(|(i, p)| if i == class { 0.8 } else { *p }).collect::<Vec<_>>();
        let line: Vec<f32> = [0, 1, 1, 0, 1, 2, 2, 0].into_iter().flat_map(step).collect();
        let classes: Vec<usize> = super::collapse(&line, 3).into_iter().map(|(class, _)| class).collect();
        assert_eq!(classes, [1, 1, 2]);
        assert!(super::collapse(&[], 3).is_empty());
    }
}
