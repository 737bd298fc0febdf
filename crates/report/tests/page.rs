//! The page of a run: what a browser would see of it.

mod common;

use common::write;
use serde_json::json;
use std::path::Path;

fn page_of(folder: &Path) -> report::Result<String> {
    report::html(&[folder], folder)
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
    let page = page_of(folder.path()).expect("page");
    assert!(page.contains("under way: 5 iterations"), "the line that is being written does not count");
    assert!(page.contains("data:video/mp4;base64,bm90IHJlYWxseSBhIHZpZGVv"));
    assert_eq!(page.matches("<video").count(), 1, "a file outside of the folder is not read");
    assert!(page.contains("aria-label=\"reward: rollouts, mean of 10 from 0 to 0.2\""), "a chart in words");
    assert!(
        page.contains("<figcaption>gradient norm before clipping</figcaption><p>0.001 throughout</p>"),
        "no chart of what never changes"
    );
    assert!(!page.contains("KL to the reference"), "what was not used is not shown");
}

#[test]
fn nothing_escapes_and_nothing_is_fetched() {
    let folder = run();
    let page = page_of(folder.path()).expect("page");
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
        let page = page_of(folder.path()).expect("page");
        assert!(page.contains(&format!("class=\"verdict {verdict}\"")), "{verdict}");
        assert!(page.contains("motion went from 0.1 to 0.3") && page.contains("role=\"alert\""));
    }
}

/// Of several rewards each has its curve, also one that the first iteration lacks; a single one is in the first chart already.
#[test]
fn several_rewards_have_a_curve_each() {
    let folder = run();
    let has = |page: &str, name: &str| page.contains(&format!("<figcaption>{name}, before its weight, mean of 10</figcaption>"));
    assert!(!has(&page_of(folder.path()).expect("page"), "shapes"));
    let line = |i: u32| {
        let late = if i > 0 {
            json!({ "shapes": 0.1 * f64::from(i), "hps": 7.5 - f64::from(i), "hps.text": 0.2 * f64::from(i) })
        } else {
            json!({ "shapes": 0.0 })
        };
        json!({ "iteration": i, "reward_mean": 0.1 * f64::from(i), "reward_components": late }).to_string() + "\n"
    };
    write(folder.path(), "metrics.jsonl", &(0..5).map(line).collect::<String>());
    let page = page_of(folder.path()).expect("page");
    assert!(has(&page, "shapes") && has(&page, "hps"), "{page}");
    assert!(page.contains("<figcaption>parts of the reward, mean of 10</figcaption>"));
}

/// The summary from before a run was extended is not its result.
#[test]
fn an_extended_run_is_under_way_again() {
    let folder = tempfile::tempdir().expect("folder");
    common::finished_run(folder.path(), "flash-grpo", 1, 0.1);
    let over = || report::load::is_over(folder.path()).expect("a run");
    let summary = std::fs::read_to_string(folder.path().join("summary.json")).expect("summary");
    assert!(over(), "a summary without a count is taken as it is");
    let counted = |made: u32| {
        let mut summary: serde_json::Value = serde_json::from_str(&summary).expect("json");
        summary["iterations"] = made.into();
        write(folder.path(), "summary.json", &summary.to_string());
    };
    counted(40);
    assert!(over());
    counted(20);
    assert!(!over());
    assert!(page_of(folder.path()).expect("page").contains("under way: 40 iterations"));
}

#[test]
fn a_folder_without_a_run_is_an_error() {
    let folder = tempfile::tempdir().expect("folder");
    let error = page_of(folder.path()).expect_err("no run").to_string();
    assert!(
        error.contains("recipe.toml") && error.contains("hint: give a folder that `flash-grpo train` or `flash-grpo compare` wrote"),
        "{error}"
    );
    write(folder.path(), "recipe.toml", "");
    write(folder.path(), "metrics.jsonl", "{\"iteration\": 0}\nnonsense\n");
    let error = page_of(folder.path()).expect_err("broken").to_string();
    assert!(error.contains("metrics.jsonl") && error.contains("line 2"), "{error}");
}

#[test]
fn a_comparison_shows_its_table_first() {
    let folder = tempfile::tempdir().expect("folder");
    common::comparison(folder.path(), 20);
    let page = page_of(folder.path()).expect("page");
    assert!(page.contains("20 recipes, 5 seeds each"));
    let place = |text: &str| page.find(text).unwrap_or_else(|| panic!("no `{text}`"));
    let order = ["<h2>Result", "<h2>Against flash-grpo", "<h2>Curves", "<h2>One by one", "<h2>Runs"].map(place);
    assert!(order.is_sorted(), "{order:?}");
    assert!(page.contains("href=\"./runs/flow-grpo/seed-2/report.html\""), "a run's page is found where the folder is now");
    assert_eq!(page.matches("<video").count(), 8, "two pairs of one run of each row that is there");
    assert!(page.contains("look at the videos of 2 runs"), "alarms are seen without opening anything");
    let elsewhere = tempfile::tempdir().expect("folder");
    let other = report::html(&[folder.path()], elsewhere.path()).expect("page");
    assert!(!other.contains("<a href"), "no link to what does not lie below the page");
}

#[test]
fn legends_are_ordered_by_the_final_reward() {
    let folder = tempfile::tempdir().expect("folder");
    common::comparison(folder.path(), 20);
    let page = page_of(folder.path()).expect("page");
    let legend = page.split("class=\"legend\"").nth(1).and_then(|rest| rest.split("</ul>").next()).expect("legend");
    let last = |entry: &str| entry.split("class=\"last\">").nth(1)?.split('<').next()?.parse::<f64>().ok();
    let values: Vec<f64> = legend.split("<li>").filter_map(last).collect();
    assert_eq!(values.len(), 20);
    assert!(values.is_sorted_by(|a, b| a >= b), "{values:?}");
}

#[test]
fn a_table_alone_is_a_page_and_bad_names_stay_text() {
    let mut table = common::table(3);
    table["rows"][1]["name"] = "<script>alert(1)</script>".into();
    table["rows"][1]["runs"] = json!(["/etc/passwd", "..", ""]);
    table["rows"][2]["reward"] = json!({ "mean": null, "low": null, "high": null });
    table["rows"][2]["seconds_per_iteration"] = json!(null);
    let folder = tempfile::tempdir().expect("folder");
    write(folder.path(), "table.json", &table.to_string());
    let page = page_of(folder.path()).expect("page");
    assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert(1)"));
    assert!(!page.contains("<h2>Runs"), "its runs are gone");
    write(folder.path(), "table.json", "{}");
    let error = page_of(folder.path()).expect_err("not a table").to_string();
    assert!(error.contains("table.json") && error.contains("hint: make the comparison anew"), "{error}");
}

#[test]
fn a_comparison_under_way_shows_its_runs() {
    let folder = tempfile::tempdir().expect("folder");
    common::comparison(folder.path(), 3);
    std::fs::remove_file(folder.path().join("table.json")).expect("table");
    let page = page_of(folder.path()).expect("page");
    assert!(page.contains("<h1>4 runs</h1>") && page.contains("flow-grpo/seed-2"));
}

#[test]
fn several_runs_and_comparisons_share_a_page() {
    let folder = tempfile::tempdir().expect("folder");
    let [a, b, c] = ["first/seed-1", "second/seed-1", "compare"].map(|name| folder.path().join(name));
    common::finished_run(&a, "flash-grpo", 1, 0.1);
    common::finished_run(&b, "flow-grpo", 1, 0.2);
    common::comparison(&c, 3);
    let page = report::html(&[&a, &b, &c], folder.path()).expect("page");
    assert!(page.contains("<h1>1 comparison, 2 runs</h1>"));
    let place = |text: &str| page.find(text).unwrap_or_else(|| panic!("no `{text}`"));
    assert!(place("second/seed-1 (flow-grpo)") < place("first/seed-1 (flash-grpo)"), "told apart, best first");
    assert!(page.contains("<figcaption>held-out reward</figcaption>"), "over forwards, at equal compute");
    let error = report::html(&[&a, &folder.path().join("nothing")], folder.path()).expect_err("no run").to_string();
    assert!(error.contains("nothing"), "{error}");
}
