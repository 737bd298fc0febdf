//! What every reward must satisfy, whoever wrote it.

use crate::{Batching, Reward, RewardError, Sample, Scored, SetupError};

/// A reward under a name of the recipe, held to the contract:
///
/// ```text
/// as many results as samples;  every value and component is finite;  low <= value <= high, where limits are set
/// ```
///
/// What breaks it is an error of its sample, never a number.
pub struct Guarded<R> {
    inner: R,
    name: String,
    limits: Option<[f64; 2]>,
}

impl<R: Reward> Guarded<R> {
    /// Wraps a reward; without a name it keeps its own.
    pub fn new(inner: R, name: Option<String>, limits: Option<[f64; 2]>) -> Self {
        let name = name.unwrap_or_else(|| inner.name().to_owned());
        Self { inner, name, limits }
    }

    fn checked(&self, sample: &Sample<'_>, scored: Scored) -> Scored {
        let error = |reason: String| Err(RewardError::new(&self.name, sample.prompt, reason));
        let score = scored.map_err(|error| RewardError { reward: self.name.clone(), ..error })?;
        if !score.value.is_finite() {
            return error(format!("the value is `{}`, not a finite number", score.value));
        }
        if let Some((part, value)) = score.components.iter().find(|(_, value)| !value.is_finite()) {
            return error(format!("the component `{part}` is `{value}`, not a finite number"));
        }
        match self.limits {
            Some([low, high]) if !(low..=high).contains(&score.value) => {
                error(format!("the value `{}` is outside `limits` = [{low}, {high}]", score.value))
            }
            _ => Ok(score),
        }
    }

    fn all_checked(&self, batch: &[Sample<'_>], scores: Vec<Scored>) -> Vec<Scored> {
        if scores.len() != batch.len() {
            let reason = format!("the reward gave {} results for {} samples", scores.len(), batch.len());
            return batch.iter().map(|sample| Err(RewardError::new(&self.name, sample.prompt, &reason))).collect();
        }
        batch.iter().zip(scores).map(|(sample, scored)| self.checked(sample, scored)).collect()
    }
}

impl<R: Reward> Reward for Guarded<R> {
    fn name(&self) -> &str {
        &self.name
    }

    fn check_prompt(&self, prompt: &str) -> Result<(), RewardError> {
        self.inner.check_prompt(prompt).map_err(|error| RewardError { reward: self.name.clone(), ..error })
    }

    fn prepare(&self) -> Result<(), SetupError> {
        self.inner.prepare().map_err(|error| error.of(&self.name))
    }

    fn identity(&self) -> Option<String> {
        self.inner.identity()
    }

    fn cache_key(&self) -> Option<String> {
        self.inner.cache_key()
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.all_checked(batch, self.inner.score(batch))
    }

    fn largest_batching(&self) -> Option<Batching> {
        self.inner.largest_batching()
    }

    fn score_batched(&self, batch: &[Sample<'_>], batching: Batching) -> Vec<Scored> {
        self.all_checked(batch, self.inner.score_batched(batch, batching))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RewardBreakdown;
    use video::Frames;

    struct Says(Vec<f64>);

    impl Reward for Says {
        fn name(&self) -> &str {
            "says"
        }

        fn score(&self, _: &[Sample<'_>]) -> Vec<Scored> {
            self.0.iter().map(|&value| Ok(RewardBreakdown::from(value))).collect()
        }
    }

    fn scored(values: Vec<f64>, limits: Option<[f64; 2]>) -> Vec<Result<f64, String>> {
        let frames = Frames::new(1, 1, 1, vec![0.0; 3]).expect("frames");
        let guarded = Guarded::new(Says(values), Some("mine".into()), limits);
        let short = |scored: Scored| scored.map(|s| s.value).map_err(|e| e.to_string());
        guarded.score(&[Sample::new("a", &frames), Sample::new("b", &frames)]).into_iter().map(short).collect()
    }

    #[test]
    fn numbers_that_are_none_are_errors() {
        let nan = "reward `mine` cannot score the prompt `b`: the value is `NaN`, not a finite number".to_owned();
        assert_eq!(scored(vec![1.0, f64::NAN], None), [Ok(1.0), Err(nan)]);
        assert!(scored(vec![f64::INFINITY, 1.0], None)[0].is_err());
    }

    #[test]
    fn limits_and_counts_are_kept() {
        let scores = scored(vec![0.5, 2.0], Some([0.0, 1.0]));
        assert_eq!(scores[0], Ok(0.5));
        assert!(scores[1].as_ref().is_err_and(|e| e.contains("outside `limits` = [0, 1]")), "{scores:?}");
        assert!(scored(vec![0.5], None).iter().all(|s| s.as_ref().is_err_and(|e| e.contains("1 results for 2 samples"))));
    }
}
