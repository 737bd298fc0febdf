//! The page of a run: what a browser would see of it.

use serde_json::json;
use std::path::Path;

fn write(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
    std::fs::write(path, text).expect("write");
}

/// A run under way, with prompts that try to be markup.
fn run() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("folder");
    write(folder.path(), "recipe.toml", "seed = 1 # </pre><script>alert(1)</script>\n");
    let line = |i: u32| {
        json!({ "iteration": i, "reward_mean": 0.1 * f64::from(i), "grad_norm": 1e-3, "kl": 0.0, "clip_fraction": 0.5,
        "ratio_deviation": 0.0, "reward_group_std": 0.1, "reward_components": { "shapes": 0.5, "shapes.color": 0.25 } })
    };
    let metrics: Vec<String> = (0..5).map(|i| line(i).to_string()).collect();
    write(folder.path(), "metrics.jsonl", &format!("{}\n{{\"iteration\": 5, \"rew", metrics.join("\n")));
    let sample = |prompt: usize, value: f64, video: &str| {
        json!({ "prompt": prompt, "text": format!("<img src=http://evil/{prompt}>"),
        "reward": { "value": value, "components": {} }, "video": video })
    };
    let evaluation =
        |values: [f64; 2]| json!({ "guards": {}, "samples": [sample(0, values[0], "0.mp4"), sample(1, values[1], "../../etc/passwd")] });
    write(folder.path(), "evaluation-before.json", &evaluation([0.2, 0.9]).to_string());
    write(folder.path(), "samples/0.mp4", "not really a video");
    folder
}

#[test]
fn a_run_under_way_has_a_page() {
    let folder = run();
    let page = report::html(folder.path()).expect("page");
    assert!(page.contains("under way: 5 iterations"), "the line that is being written does not count");
    assert!(page.contains("data:video/mp4;base64,bm90IHJlYWxseSBhIHZpZGVv"));
    assert_eq!(page.matches("<video").count(), 1, "a file outside of the folder is not read");
    for title in ["aria-label=\"reward\"", "aria-label=\"gradient norm before clipping\"", "aria-label=\"share of clipped ratios\""] {
        assert!(page.contains(title), "{title}");
    }
    assert!(!page.contains("KL to the reference"), "what was not used is not shown");
}

#[test]
fn nothing_escapes_and_nothing_is_fetched() {
    let folder = run();
    let page = report::html(folder.path()).expect("page");
    assert!(!page.contains("<script") && !page.contains("<img"), "text became markup");
    assert!(page.contains("&lt;img src=http://evil/0&gt;"));
    let without_namespaces = page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "");
    let links = without_namespaces.matches("http").count();
    assert_eq!(links, page.matches("&lt;img src=http").count());
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn a_finished_run_says_what_came_out() {
    let folder = run();
    let summary = |low: f64, high: f64| {
        json!({ "method": "flash-grpo", "seed": 1, "num_samples": 8, "num_prompts": 2, "eval_reward_before": 0.5, "eval_reward_after": 0.6,
            "eval_reward_difference": 0.1, "eval_reward_interval": [low, high], "components": { "shapes": [0.5, 0.6] },
            "guards": { "motion": [0.1, 0.3] }, "alarms": ["motion went from 0.1 to 0.3"], "checks": { "noise_power": 1.0 }, "seconds": { "load": 0.5 } })
        .to_string()
    };
    for (low, high, verdict) in [(0.05, 0.15, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.1, "undecided")] {
        write(folder.path(), "summary.json", &summary(low, high));
        let page = report::html(folder.path()).expect("page");
        assert!(page.contains(&format!("class=\"verdict {verdict}\"")), "{verdict}");
        assert!(page.contains("motion went from 0.1 to 0.3") && page.contains("role=\"alert\""));
    }
}

#[test]
fn a_folder_without_a_run_is_an_error() {
    let folder = tempfile::tempdir().expect("folder");
    let error = report::html(folder.path()).expect_err("no run").to_string();
    assert!(error.contains("recipe.toml") && error.contains("hint: give the folder that `flash-grpo train` wrote"), "{error}");
    write(folder.path(), "recipe.toml", "");
    write(folder.path(), "metrics.jsonl", "{\"iteration\": 0}\nnonsense\n");
    let error = report::html(folder.path()).expect_err("broken").to_string();
    assert!(error.contains("metrics.jsonl") && error.contains("line 2"), "{error}");
}
