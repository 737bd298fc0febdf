//! Run and comparison folders, made of small files.
#![allow(dead_code, reason = "each test uses a part")]

use serde_json::{Value, json};
use std::path::Path;
use video::Frames;

pub fn write(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
    std::fs::write(path, text).expect("write");
}

/// A number in [0, 1) that looks random.
fn noise(seed: u64) -> f64 {
    let mut bits = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (bits ^ (bits >> 27)) as f64 / u64::MAX as f64
}

/// A square that moves, of a colour that says which clip it is.
fn clip(path: &Path, which: usize) {
    const SIDE: usize = 64;
    let pixel = |frame: usize, y: usize, x: usize| {
        let inside = (20..44).contains(&y) && (4 + 4 * frame..24 + 4 * frame).contains(&x);
        (0..3).map(move |channel| if inside { 0.3 + 0.7 * ((which >> channel & 1) as f32) } else { 0.1 })
    };
    let places = (0..9).flat_map(|frame| (0..SIDE).flat_map(move |y| (0..SIDE).map(move |x| (frame, y, x))));
    let data = places.flat_map(|(frame, y, x)| pixel(frame, y, x)).collect();
    let frames = Frames::new(9, SIDE, SIDE, data).expect("frames");
    std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
    video::write(path, &frames, 8.0).expect("video");
}

/// A finished run: 40 iterations, 6 videos before and after, an alarm; `gain` is what it learns.
pub fn finished_run(folder: &Path, method: &str, seed: u64, gain: f64) {
    write(folder, "recipe.toml", &format!("seed = {seed}\n\n[method]\nname = \"{method}\"\n# {}\n", "a long line ".repeat(20)));
    let metrics = |i: u64| {
        let at = |purpose: u64| noise(seed * 1000 + i * 10 + purpose);
        let reward = 0.54 + gain * i as f64 / 40.0 + 0.1 * (at(0) - 0.5);
        json!({ "iteration": i, "forwards": 663, "reward_mean": reward, "grad_norm": 1e-3 * (1.0 + at(1)), "kl": 0.0, "clip_fraction": 0.0,
            "ratio_deviation": 0.0, "reward_group_std": 0.05 + 0.02 * at(2),
            "reward_components": { "shapes": reward, "shapes.color": reward + 0.1, "shapes.motion": reward - 0.1 * at(3), "shapes.object": 0.9 } })
    };
    let timings = |i: u64| json!({ "iteration": i, "seconds": { "rollout": 0.8 + 0.1 * noise(i), "reward": 0.7, "update": 0.2 } });
    let lines = |of: &dyn Fn(u64) -> Value, every: usize| (0..40).step_by(every).map(|i| format!("{}\n", of(i))).collect::<String>();
    write(folder, "metrics.jsonl", &lines(&metrics, 1));
    write(folder, "timings.jsonl", &lines(&timings, 1));
    write(folder, "eval.jsonl", &lines(&|i| json!({ "iteration": i, "eval_reward": 0.54 + gain * i as f64 / 40.0 }), 10));
    for (side, shift) in [("before", 0.0), ("after", gain)] {
        let sample = |prompt: usize| {
            let video = format!("{prompt:02}-{side}.mp4");
            clip(&folder.join("samples").join(&video), prompt + 1);
            json!({ "prompt": prompt, "text": format!("a {} square moves right", ["red", "green", "yellow", "blue", "purple", "cyan"][prompt]),
                "reward": { "value": 0.5 + shift * (2.0 - prompt as f64), "components": {} }, "video": video })
        };
        let evaluation = json!({ "guards": {}, "samples": (0..6).map(sample).collect::<Vec<_>>() });
        write(folder, &format!("evaluation-{side}.json"), &evaluation.to_string());
    }
    write(folder, "summary.json", &summary(method, seed, gain).to_string());
}

fn summary(method: &str, seed: u64, gain: f64) -> Value {
    json!({ "method": method, "seed": seed, "num_samples": 144, "num_prompts": 18,
        "eval_reward_before": 0.54, "eval_reward_after": 0.54 + gain, "eval_reward_difference": gain,
        "eval_reward_interval": [gain - 0.05, gain + 0.05], "components": { "shapes": [0.54, 0.54 + gain], "shapes.color": [0.6, 0.7] },
        "guards": { "brightness": [0.16, 0.17], "motion": [0.016, 0.035] },
        "alarms": if gain < 0.0 { vec!["motion went from 0.016 to 0.035"] } else { vec![] },
        "checks": { "ratio_deviation": 0.0, "noise_power": 1.001, "log_prob_noise_floor": 2.5e-7 },
        "seconds": { "load": 0.08, "checks": 2.6, "evaluation": 12.1, "training": 132.9 } })
}

/// The table of a comparison of `rows` recipes over 5 seeds.
pub fn table(rows: usize) -> Value {
    let names = ["flash-grpo", "flow-grpo", "no-tgr", "no-itg", "mixgrpo", "dancegrpo", "tempflow", "flash-grpo-independent-noise"];
    let interval = |mean: f64, half: f64| json!({ "mean": mean, "low": mean - half, "high": mean + half });
    let row = |i: usize| {
        let name = if i < names.len() { names[i].to_owned() } else { format!("flow-grpo-variant-{i}") };
        let gain = 0.3 * noise(i as u64 + 3) - 0.05;
        let point = |k: usize| {
            let share = k as f64 / 4.0;
            json!([share, interval(0.54 + gain * share.sqrt(), 0.1 * share * noise(i as u64))])
        };
        let difference = json!({ "mean": gain - 0.15, "interval": [gain - 0.19, gain - 0.11] });
        json!({ "name": name, "reward": interval(0.54 + gain, 0.1 * noise(i as u64)), "area_under_curve": interval(0.54 + gain / 2.0, 0.02),
            "curve": (0..5).map(point).collect::<Vec<_>>(), "difference": if i == 0 { Value::Null } else { difference }, "share_to_match": if gain > 0.05 { json!(0.4) } else { Value::Null },
            "iterations": 40, "forwards_per_iteration": 663 + 400 * (i as u64 % 5), "seconds_per_iteration": 2.78, "gradient_variability": 0.41,
            "collapses": u64::from(gain < 0.0), "runs": [format!("/elsewhere/runs/{name}/seed-1"), format!("/elsewhere/runs/{name}/seed-2")] })
    };
    json!({ "seeds": 5, "rows": (0..rows).map(row).collect::<Vec<_>>() })
}

/// A comparison folder of `rows` recipes; the runs of the first two are there, with their pages.
pub fn comparison(folder: &Path, rows: usize) {
    write(folder, "table.json", &table(rows).to_string());
    for (row, gain) in [("flash-grpo", 0.2), ("flow-grpo", -0.1)] {
        for seed in 1..=2 {
            let run = folder.join("runs").join(row).join(format!("seed-{seed}"));
            finished_run(&run, row, seed, gain);
            write(&run, "report.html", "<!DOCTYPE html>");
        }
    }
}
