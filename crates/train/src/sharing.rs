//! Which velocities of a batch have to be computed, and what an iteration costs. Pure functions of the plans.

use grpo::StepPlan;
use std::collections::BTreeMap;

/// What the samples of a batch have in common, step by step.
#[derive(Debug, Clone, Copy)]
pub struct Shares<'a> {
    /// The steps of each sample.
    pub plans: &'a [StepPlan],
    /// For each sample the first one of the batch that starts from the same latents with the same prompt; itself where nothing is
    /// shared.
    pub leaders: &'a [usize],
    /// Steps that a solver of higher order takes after a sample's last stochastic step, instead of all that are left.
    pub suffix: Option<usize>,
}

impl Shares<'_> {
    /// The samples that take `step` of the schedule: all, or with a compressed suffix those that are not beyond their last random step.
    pub fn running(&self, step: usize) -> Vec<usize> {
        (0..self.plans.len()).filter(|&sample| self.suffix.is_none() || step < self.suffix_start(sample)).collect()
    }

    /// The step from which on nothing of a sample is random -> the samples. Empty without a compressed suffix.
    pub fn suffixes(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut starts: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for sample in (0..self.plans.len()).filter(|_| self.suffix.is_some()) {
            starts.entry(self.suffix_start(sample)).or_default().push(sample);
        }
        starts
    }

    fn suffix_start(&self, sample: usize) -> usize {
        self.plans[sample].stochastic.last().map_or(0, |last| last + 1)
    }

    /// Who the latents of `sample` at `step` belong to: those of one leader that have not drawn noise yet are one.
    pub fn owner(&self, sample: usize, step: usize) -> usize {
        let on_trunk = |other: &usize| step <= self.plans[*other].prefix_len();
        let mut together = (0..self.plans.len()).filter(|&other| self.leaders[other] == self.leaders[sample]);
        if on_trunk(&sample) { together.find(on_trunk).unwrap_or(sample) } else { sample }
    }

    /// The samples of `among` that differ at `step`, and for each of `among` its place among them.
    pub fn distinct(&self, step: usize, among: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let owners: Vec<usize> = among.iter().map(|&sample| self.owner(sample, step)).collect();
        let (firsts, places) = first_of_each(&owners);
        (firsts.into_iter().map(|first| among[first]).collect(), places)
    }

    /// The samples that each step trains, and how many of their velocities differ; of the steps that train any.
    pub fn trained(&self, num_steps: usize) -> Vec<(Vec<usize>, usize)> {
        let of = |step: usize| (0..self.plans.len()).filter(|&sample| self.plans[sample].is_trained(step)).collect::<Vec<_>>();
        let steps = (0..num_steps).map(|step| (step, of(step))).filter(|(_, samples)| !samples.is_empty());
        steps.map(|(step, samples)| (samples.clone(), self.distinct(step, &samples).0.len())).collect()
    }

    /// The work of a rollout over `num_steps` and of one update from it.
    pub fn work(&self, num_steps: usize, retain: bool) -> Work {
        let mut work = Work::default();
        for step in 0..num_steps {
            let running = self.running(step);
            let (trained, others): (Vec<usize>, Vec<usize>) = running.iter().partition(|&&sample| self.plans[sample].is_trained(step));
            let trained_rows = self.distinct(step, &trained).0.len();
            if retain {
                work.sampled += self.distinct(step, &others).0.len() + trained_rows;
                work.retained += trained_rows;
            } else {
                work.sampled += self.distinct(step, &running).0.len();
                work.replayed += trained_rows;
            }
        }
        for (start, samples) in self.suffixes() {
            work.sampled += samples.len() * self.suffix.unwrap_or(0).min(num_steps - start);
        }
        work
    }
}

/// Positions of the first occurrence of each key, and for every entry its place among them.
pub fn first_of_each(keys: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut firsts: Vec<usize> = Vec::new();
    let mut places = Vec::new();
    for (i, key) in keys.iter().enumerate() {
        let known = firsts.iter().position(|&first| keys[first] == *key);
        places.push(known.unwrap_or(firsts.len()));
        if known.is_none() {
            firsts.push(i);
        }
    }
    (firsts, places)
}

/// Velocities of one sample, without guidance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Computed while sampling.
    pub sampled: usize,
    /// Computed once more for an update, and backpropagated.
    pub replayed: usize,
    /// Backpropagated from the graph that sampling kept.
    pub retained: usize,
}

impl Work {
    /// In forwards of one sample: a backward pass counts two, guidance doubles all.
    ///
    /// ```text
    /// forwards = branches (sampled + 3 replayed + 2 retained)
    /// ```
    pub fn forwards(&self, guidance_scale: f64) -> u64 {
        let branches = if guidance_scale == 1.0 { 1 } else { 2 };
        branches * (self.sampled + 3 * self.replayed + 2 * self.retained) as u64
    }
}

impl std::iter::Sum for Work {
    fn sum<I: Iterator<Item = Work>>(parts: I) -> Work {
        parts.fold(Work::default(), |sum, part| Work {
            sampled: sum.sampled + part.sampled,
            replayed: sum.replayed + part.replayed,
            retained: sum.retained + part.retained,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two prompts of three samples; the stochastic step is 1 for the first, 3 for the second, of 6.
    fn plans() -> Vec<StepPlan> {
        [1, 1, 1, 3, 3, 3].map(|step| StepPlan { stochastic: vec![step], trained: vec![step] }).to_vec()
    }

    #[test]
    fn what_is_shared_is_computed_once() {
        let plans = plans();
        let alone: Vec<usize> = (0..6).collect();
        let plain = Shares { plans: &plans, leaders: &alone, suffix: None };
        assert_eq!(plain.work(6, false), Work { sampled: 36, replayed: 6, retained: 0 });
        assert_eq!(plain.work(6, true), Work { sampled: 36, replayed: 0, retained: 6 });
        let shared = Shares { leaders: &[0, 0, 0, 3, 3, 3], ..plain };
        // step 0, 1: one each; 2, 3: three and one; 4, 5: all
        assert_eq!(shared.work(6, false), Work { sampled: 2 + 2 + 4 + 4 + 6 + 6, replayed: 2, retained: 0 });
        assert_eq!(shared.distinct(2, &[1, 2, 4, 5]), (vec![1, 2, 4], vec![0, 1, 2, 2]));
        // the first group has 4 steps left, the second 2
        let compressed = Shares { suffix: Some(3), ..shared };
        assert_eq!(compressed.work(6, false).sampled, 2 + 2 + 1 + 1 + 3 * 3 + 3 * 2);
        assert_eq!(compressed.work(6, true).forwards(4.5), 2 * (21 + 2 * 2));
        assert_eq!(shared.trained(6), [(vec![0, 1, 2], 1), (vec![3, 4, 5], 1)]);
        assert_eq!(plain.trained(6), [(vec![0, 1, 2], 3), (vec![3, 4, 5], 3)]);
    }
}
