//! `scheduler/scheduler_config.json`: solver, sigma grid and shift.

use crate::config::read_json;
use crate::error::{Error, Result};
use crate::solver::SolverKind;
use grpo::SigmaGrid;
use serde_json::{Map, Value, json};
use std::path::Path;

/// How a model is sampled, as its folder says it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulerConfig {
    /// Solver of the flow ODE.
    pub solver: SolverKind,
    /// Layout of the sigmas.
    pub grid: SigmaGrid,
    /// Shift of the sigmas towards noise.
    pub shift: f64,
}

impl SchedulerConfig {
    /// Reads `DIR/scheduler_config.json`.
    ///
    /// `UniPCMultistepScheduler` changed its sigma grid with diffusers 0.37; which one is meant is told by the version
    /// the file was written with. A file without a version counts as an older one, like the files of Wan2.1.
    ///
    /// # Errors
    /// Unreadable file, another scheduler, or a setting that changes what ours computes.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("scheduler_config.json");
        let config: Map<String, Value> = read_json(&path)?;
        Self::from_json(&config).map_err(|reason| Error::invalid(&path, reason, "use the scheduler_config.json of a Wan2.1 model"))
    }

    fn from_json(config: &Map<String, Value>) -> std::result::Result<Self, String> {
        let class = config.get("_class_name").and_then(Value::as_str).unwrap_or_default();
        let (expected, shift, solver, grid): (&[Expectation], _, _, _) = match class {
            "UniPCMultistepScheduler" => (&UNIPC, "flow_shift", SolverKind::Unipc, unipc_grid(config)),
            "FlowMatchEulerDiscreteScheduler" => (&EULER, "shift", SolverKind::Euler, SigmaGrid::Euler),
            _ => {
                return Err(format!("`_class_name` is `{class}`, expected `UniPCMultistepScheduler` or `FlowMatchEulerDiscreteScheduler`"));
            }
        };
        for expectation in expected {
            expectation.check(config)?;
        }
        let shift = match config.get(shift) {
            None => 1.0,
            Some(value) => {
                value.as_f64().filter(|s| s.is_finite() && *s > 0.0).ok_or(format!("`{shift}` is `{value}`, expected a positive number"))?
            }
        };
        Ok(Self { solver, grid, shift })
    }
}

/// A setting with its only supported value; an absent one has diffusers' default, `when_absent`.
struct Expectation {
    key: &'static str,
    value: &'static str,
    when_absent: bool,
}

/// `value` in JSON, which is also the default.
const fn default(key: &'static str, value: &'static str) -> Expectation {
    Expectation { key, value, when_absent: true }
}

/// `value` in JSON; the default is another one.
const fn set(key: &'static str, value: &'static str) -> Expectation {
    Expectation { key, value, when_absent: false }
}

const UNIPC: [Expectation; 16] = [
    set("use_flow_sigmas", "true"),
    set("prediction_type", "\"flow_prediction\""),
    default("num_train_timesteps", "1000"),
    default("solver_order", "2"),
    default("solver_type", "\"bh2\""),
    default("predict_x0", "true"),
    default("lower_order_final", "true"),
    default("disable_corrector", "[]"),
    default("final_sigmas_type", "\"zero\""),
    default("thresholding", "false"),
    default("use_karras_sigmas", "false"),
    default("use_exponential_sigmas", "false"),
    default("use_beta_sigmas", "false"),
    default("use_dynamic_shifting", "false"),
    default("solver_p", "null"),
    default("shift_terminal", "null"),
];

const EULER: [Expectation; 8] = [
    default("num_train_timesteps", "1000"),
    default("use_dynamic_shifting", "false"),
    default("invert_sigmas", "false"),
    default("shift_terminal", "null"),
    default("use_karras_sigmas", "false"),
    default("use_exponential_sigmas", "false"),
    default("use_beta_sigmas", "false"),
    default("stochastic_sampling", "false"),
];

impl Expectation {
    fn check(&self, config: &Map<String, Value>) -> std::result::Result<(), String> {
        let expected: Value = serde_json::from_str(self.value).unwrap_or_else(|_| json!(self.value));
        match config.get(self.key) {
            None if self.when_absent => Ok(()),
            None => Err(format!("`{}` is missing, expected `{}`", self.key, self.value)),
            Some(got) if *got == expected || (expected == json!(false) && got.is_null()) => Ok(()),
            Some(got) => Err(format!("`{}` is `{got}`, only `{}` is supported", self.key, self.value)),
        }
    }
}

/// The grid of the diffusers version (`0.33.1`, `0.37.0.dev0`) that wrote the file.
fn unipc_grid(config: &Map<String, Value>) -> SigmaGrid {
    let version = config.get("_diffusers_version").and_then(Value::as_str).unwrap_or_default();
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (0, 37) { SigmaGrid::Unipc037 } else { SigmaGrid::Unipc }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: Value) -> std::result::Result<SchedulerConfig, String> {
        SchedulerConfig::from_json(json.as_object().expect("object"))
    }

    fn unipc(version: &str) -> Value {
        json!({"_class_name": "UniPCMultistepScheduler", "_diffusers_version": version, "use_flow_sigmas": true,
               "prediction_type": "flow_prediction", "flow_shift": 3.0})
    }

    #[test]
    fn the_version_chooses_the_grid() {
        for (version, grid) in [
            ("0.33.0.dev0", SigmaGrid::Unipc),
            ("0.36.1", SigmaGrid::Unipc),
            ("0.37.0.dev0", SigmaGrid::Unipc037),
            ("0.42.1", SigmaGrid::Unipc037),
            ("1.0", SigmaGrid::Unipc037),
        ] {
            let expected = SchedulerConfig { solver: SolverKind::Unipc, grid, shift: 3.0 };
            assert_eq!(parse(unipc(version)), Ok(expected), "{version}");
        }
        let euler = json!({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0});
        assert_eq!(parse(euler), Ok(SchedulerConfig { solver: SolverKind::Euler, grid: SigmaGrid::Euler, shift: 5.0 }));
    }

    #[test]
    fn settings_that_matter_are_refused() {
        for (key, value, message) in [
            ("_class_name", json!("DDIMScheduler"), "`_class_name` is `DDIMScheduler`"),
            ("prediction_type", json!("epsilon"), "`prediction_type` is `\"epsilon\"`"),
            ("solver_order", json!(3), "`solver_order` is `3`, only `2` is supported"),
            ("flow_shift", json!(-1), "`flow_shift` is `-1`, expected a positive number"),
        ] {
            let mut config = unipc("0.42.1");
            config[key] = value;
            let error = parse(config).expect_err("refused");
            assert!(error.starts_with(message), "{error}");
        }
    }
}
