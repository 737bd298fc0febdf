//! `flash-grpo compare` in its quick form: the whole way from recipes to the page.

use assert_cmd::Command;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn compare(folder: &Path, arguments: &[&str]) -> (String, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    command.current_dir(root()).arg("compare").args(arguments).arg("--output-dir").arg(folder);
    let output = command.output().expect("runs");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let table = std::fs::read_to_string(folder.join("table.json")).expect("table.json");
    (log, serde_json::from_str(&table).expect("JSON"))
}

#[test]
fn the_quick_form_makes_everything_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let recipes = ["recipes/moving_shapes/flow-grpo.toml", "recipes/moving_shapes/flash-grpo-cheapest.toml"];
    let (log, table) = compare(folder.path(), &[recipes[0], recipes[1], "--quick", "--jobs", "2"]);
    assert_eq!(log.matches("held-out reward").count(), 4, "{log}");
    let rows = table["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!((names, table["seeds"].as_u64()), (vec!["flow-grpo", "flash-grpo-cheapest"], Some(2)));
    let cost = |row: &Value| row["forwards_per_iteration"].as_f64().expect("cost");
    assert!(cost(&rows[0]) > 6.0 * cost(&rows[1]), "{} and {}", rows[0], rows[1]);
    for row in rows {
        assert!(row["reward"]["mean"].as_f64().is_some_and(|reward| (0.0..=1.0).contains(&reward)), "{row}");
        assert!(row["seconds_per_iteration"].as_f64().is_some_and(|seconds| seconds > 0.0), "{row}");
        // what the runs spent is what the table says, up to the draw of their steps
        let metrics = std::fs::read_to_string(Path::new(row["runs"][0].as_str().expect("a run")).join("metrics.jsonl")).expect("metrics");
        let spent: Vec<f64> = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["forwards"].as_f64()).collect();
        let mean = spent.iter().sum::<f64>() / spent.len() as f64;
        assert!((mean / cost(row) - 1.0).abs() < 0.2, "{mean} and {}", cost(row));
    }
    let page = std::fs::read_to_string(folder.path().join("report.html")).expect("page");
    assert!(page.contains("flash-grpo-cheapest") && folder.path().join("table.md").exists());
    // nothing is made again, and the same table comes out
    let (log, again) = compare(folder.path(), &[recipes[0], recipes[1], "--quick"]);
    assert!(!log.contains("held-out reward"), "{log}");
    assert_eq!(again, table);
}

#[test]
fn a_budget_of_seconds_is_spent_by_the_clock() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let small =
        ["rollout.prompts_per_iteration=1", "rollout.group_size=4", "eval.num_prompts=2", "eval.samples_per_prompt=1", "eval.videos=1"];
    let mut arguments = vec!["recipes/moving_shapes/flash-grpo.toml", "--seeds", "1", "--budget", "3seconds"];
    for change in &small {
        arguments.extend(["--set", change]);
    }
    let (_, table) = compare(folder.path(), &arguments);
    let iterations = table["rows"][0]["iterations"].as_f64().expect("iterations");
    let pilot = std::fs::read_to_string(folder.path().join("pilots/flash-grpo/timings.jsonl")).expect("the pilot's times");
    let seconds: Vec<f64> = pilot
        .lines()
        .filter_map(|line| {
            serde_json::from_str::<Value>(line).ok()?["seconds"].as_object().map(|s| s.values().filter_map(Value::as_f64).sum())
        })
        .collect();
    let warm = (seconds[1] + seconds[2]) / 2.0;
    assert_eq!(iterations, (3.0 / warm).floor(), "{seconds:?}");
}
