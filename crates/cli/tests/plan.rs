//! `flash-grpo plan`, as a user sees it.

use assert_cmd::Command;
use std::path::Path;

fn plan(arguments: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash-grpo"));
    let output = command.current_dir(root).arg("plan").args(arguments).output().expect("runs");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn plans() {
    insta::assert_snapshot!("default_recipe", plan(&[]));
    let published = ["recipes/flash_grpo_wan_1_3b.toml", "--device-memory", "80GiB", "--devices", "8", "--throughput", "400"];
    insta::assert_snapshot!("published_recipe", plan(&published));
    let large = ["recipes/flash_grpo_wan_1_3b.toml", "--set", "model.path=Wan2.1-T2V-14B-Diffusers", "--device-memory", "64GiB"];
    insta::assert_snapshot!("larger_model", plan(&large));
    insta::assert_snapshot!("wan_14b", plan(&["recipes/flash_grpo_wan_14b.toml", "--device-memory", "141GB"]));
    insta::assert_snapshot!("wan_i2v_14b", plan(&["recipes/flash_grpo_wan_i2v_14b.toml", "--device-memory", "141GB"]));
    insta::assert_snapshot!("wan2_2_i2v_a14b", plan(&["recipes/flash_grpo_wan2_2_i2v_a14b.toml", "--device-memory", "141GB"]));
    insta::assert_snapshot!("wan2_2_ti2v_5b", plan(&["recipes/flash_grpo_wan2_2_ti2v_5b.toml", "--device-memory", "80GiB"]));
    insta::assert_snapshot!("wan2_2_t2v_a14b", plan(&["recipes/flash_grpo_wan2_2_t2v_a14b.toml", "--device-memory", "141GB"]));
}

#[test]
fn json_has_the_same_numbers() {
    let text = plan(&["recipes/flash_grpo_wan_1_3b.toml", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["parameters"]["transformer"], 1_418_996_800_u64);
    assert_eq!(json["work"]["tokens"], 32_760);
}

/// Both networks are there, and one of them takes a step.
#[test]
fn a_second_network_costs_memory_and_no_operations() {
    let json = |recipe: &str| -> serde_json::Value { serde_json::from_str(&plan(&[recipe, "--json"])).expect("JSON") };
    let (one, two) = (json("recipes/flash_grpo_wan_14b.toml"), json("recipes/flash_grpo_wan2_2_t2v_a14b.toml"));
    assert_eq!(one["flops"], two["flops"]);
    assert_eq!(two["parameters"]["second_transformer"], one["parameters"]["transformer"]);
    assert_eq!(two["parameters"]["trained"].as_u64(), one["parameters"]["trained"].as_u64().map(|count| 2 * count));
    let rollout = |plan: &serde_json::Value| plan["memory"][1]["total"].as_u64().expect("bytes");
    assert!(rollout(&two) - rollout(&one) > 2 * 14_288_491_584, "two bytes a weight, and the text of another network");
}

#[test]
fn nonsense_is_refused() {
    assert!(plan(&["--device-memory", "lots"]).contains("expected a size such as `80GiB`"));
    assert!(plan(&["--throughput=-1"]).contains("expected a number above 0"));
    assert!(plan(&["--price-per-hour=2"]).contains("--throughput <TFLOPS>|--measure"), "a price needs a time");
}
