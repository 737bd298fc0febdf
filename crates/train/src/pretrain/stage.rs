//! The loop of a stage: steps, learning rate, moving average, and progress on disk.

use super::Progress;
use super::settings::StageSettings;
use crate::optimizer::{AdamW, Ema, GradientSum};
use burn::tensor::{Tensor, TensorData};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use wan::error::Result;
use wan::param::ParamSet;
use wan::weights::{WeightFiles, to_floats, write_safetensors};

/// Steps between reports.
const REPORT_EVERY: usize = 20;

/// Everything that decides the future of a stage.
struct State {
    optimizer: AdamW,
    ema: Ema,
}

/// Runs `loss_of(step)` (which records a graph) for every step that is still to do and leaves the averaged weights in `params`.
///
/// # Errors
/// Progress that cannot be written, or that belongs to other sizes.
pub(super) fn run<C>(
    name: &'static str,
    stage: &StageSettings<C>,
    params: &ParamSet,
    work: &Path,
    report: &mut dyn FnMut(Progress),
    loss_of: &mut dyn FnMut(usize) -> Tensor<1>,
) -> Result<()> {
    let path = work.join(format!("{name}.safetensors"));
    params.set_trainable(true);
    let mut state = State { optimizer: AdamW::new(stage.optimizer, params), ema: Ema::new(stage.ema_decay, params) };
    let start = if path.exists() { state.load(params, &path)? } else { 0 };
    let mut losses = Vec::new();
    for step in start..stage.steps {
        let loss = loss_of(step);
        losses.push(loss.clone().inner());
        let gradients = loss.backward();
        let mut sum = GradientSum::new(params);
        sum.add(params, &gradients);
        sum.clip(stage.optimizer.max_grad_norm);
        state.optimizer.step_with(params, &sum, stage.learning_rate(step));
        state.ema.update(params);
        let done = step + 1;
        if done % REPORT_EVERY == 0 || done == stage.steps {
            let mean = losses.drain(..).map(|loss| f64::from(to_floats(loss)[0])).collect::<Vec<_>>();
            let loss = mean.iter().sum::<f64>() / mean.len() as f64;
            report(Progress { stage: name, step: done, steps: stage.steps, loss });
        }
        if done % stage.save_every == 0 || done == stage.steps {
            state.save(params, done, &path)?;
        }
    }
    params.set_trainable(false);
    params.restore(&state.ema.values);
    Ok(())
}

impl State {
    fn save(&self, params: &ParamSet, step: usize, path: &Path) -> Result<()> {
        let mut tensors = BTreeMap::new();
        for (i, slot) in params.iter().enumerate() {
            let [m, v] = self.optimizer.moments[i].clone();
            for (kind, value) in [("param", slot.value()), ("m", m), ("v", v), ("ema", self.ema.values[i].clone())] {
                tensors.insert(format!("{kind}.{}", slot.name), (slot.shape.clone(), to_floats(value)));
            }
        }
        let metadata = HashMap::from([("step".to_owned(), step.to_string())]);
        write_safetensors(path, &tensors, Some(metadata))
    }

    fn load(&mut self, params: &ParamSet, path: &Path) -> Result<usize> {
        let files = WeightFiles::open_file(path)?;
        let step: usize = files.metadata().and_then(|m| m.get("step")).and_then(|s| s.parse().ok()).unwrap_or(0);
        for (i, slot) in params.iter().enumerate() {
            let device = slot.value().device();
            let read = |kind: &str| -> Result<Tensor<1>> {
                let values = files.floats(&format!("{kind}.{}", slot.name))?;
                let count = values.len();
                Ok(Tensor::from_data(TensorData::new(values, [count]), &device))
            };
            slot.set_value(read("param")?);
            self.optimizer.moments[i] = [read("m")?, read("v")?];
            self.ema.values[i] = read("ema")?;
        }
        self.optimizer.updates = step as u64;
        self.optimizer.counts.fill(step as u64);
        self.ema.updates = step as u64;
        Ok(step)
    }
}
