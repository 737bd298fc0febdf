//! Recipes: what they resolve to, and what a mistake in one says.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use std::path::{Path, PathBuf};

use train::settings::{DEFAULT_RECIPE, MixedPrecision, PolicySettings, Prompt, PromptSource, Settings, SettingsError, read_prompt_file};

fn recipe_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes").join(name)
}

fn with(overrides: &[&str]) -> Result<Settings, SettingsError> {
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    Settings::load(None, &overrides)
}

/// The message of the built-in recipe with one change to its text.
fn message(from: &str, to: &str) -> String {
    assert!(DEFAULT_RECIPE.contains(from), "no `{from}` in the built-in recipe");
    let text = DEFAULT_RECIPE.replacen(from, to, 1);
    format!("error: {}\n", Settings::parse("mine.toml", &text, &[]).unwrap_err())
}

#[test]
fn mistakes_in_a_file() {
    let mistakes = [
        ("num_frames = 9", "num_frames = 10"),
        ("num_frames = 9", "num_frame = 9"),
        ("num_frames = 9", "num_frames = \"nine\""),
        ("num_frames = 9", "num_frames = -9"),
        ("num_frames = 9", "num_frames = 9.5"),
        ("num_frames = 9\n", ""),
        ("num_inference_steps = 10", "num_inference_steps = 1"),
        ("num_inference_steps = 10", "num_inference_steps = 0"),
        ("height = 64", "height = 60"),
        ("width = 64", "width = 0"),
        ("group_size = 8", "group_size = 1"),
        ("group_size = 8", "group_size = eight"),
        ("pool = 5", "pool = 10"),
        ("pool = 5", "pol = 5"),
        ("type = \"random\"", "type = \"ramdom\""),
        ("name = \"flash-grpo\"", "name = \"flashgrpo\""),
        ("initial_noise = \"shared-in-group\"", "initial_noise = \"shared\""),
        ("initial_noise = \"shared-in-group\"", "noise_level = { type = \"linear\", eta = 0.0 }"),
        ("clip_range = 1e-3", "clip_range = 0.0"),
        ("clip_range = 1e-3", "learning_rate = 1e-3"),
        ("betas = [0.9, 0.999]", "betas = [0.9, 1.5]"),
        ("betas = [0.9, 0.999]", "betas = [0.9]"),
        ("grid = \"unipc\"", "grid = \"ddim\""),
        ("shift = 3.0", "shift = 0.0"),
        ("target_modules = [\"to_q\", \"to_k\", \"to_v\", \"to_out.0\"]", "target_modules = []"),
        ("type = \"lora\"", "type = \"qlora\""),
        ("rank = 16", "rank = 0"),
        ("rank = 16", "ranks = 16"),
        ("[optimizer]", "[optimiser]"),
        ("[[reward]]\ntype = \"shapes\"", "[[reward]]\ntype = \"shape\""),
        ("weight = 1.0", "weight = 0.0"),
        ("eval = \"shapes:held-out\"", "eval = \"shapes:heldout\""),
        ("eval = \"shapes:held-out\"", "eval = \"shapes:held-out\"\nnegative = \"blurry\\u0007\""),
        ("solver = \"euler\"", "solver = \"heun\""),
        ("save_rollouts = false", "save_rollouts = 1"),
        ("mixed_precision = \"no\"", "mixed_precision = \"fp16\""),
        ("seed = 1", "seed = 1\nseed = 2"),
        ("[model]\npath = \"models/moving-shapes\"", ""),
    ];
    let report: String = mistakes.iter().map(|(from, to)| format!("# {}\n{}\n", to.replace('\n', " | "), message(from, to))).collect();
    insta::assert_snapshot!("mistakes_in_a_file", report);
}

/// Of several rewards, the one that is wrong is named, and where it stands.
#[test]
fn mistakes_in_one_of_several_rewards() {
    let recipe = include_str!("../../../recipes/moving_shapes_cpu.toml");
    let text = format!("{recipe}\n[[reward]]\ntype = \"brightness\"\nweight = 0\n");
    let error = Settings::parse("mine.toml", &text, &[]).expect_err("a weight of 0").to_string();
    let line = text.lines().count();
    assert!(error.starts_with(&format!("mine.toml:{line}:")) && error.contains("`reward.1.weight` is `0`"), "{error}");
    let error = Settings::parse("mine.toml", recipe, &["reward.0.weight=0".into()]).expect_err("a weight of 0").to_string();
    assert!(error.contains("--set") && error.contains("`reward.0.weight` is `0`"), "{error}");
}

#[test]
fn mistakes_in_overrides() {
    let mistakes = [
        "sampling.num_frames=10",
        "sampling.num_frame=9",
        "sampling.num_frames=nine",
        "learning_rate=1e-4",
        "optimizer.learning_rate=-1",
        "optimizer.learning_rate",
        "=3",
        "method.name=grpo",
        "method.stochastic.pool=20",
        "method.stochastic={type=\"random\", size=3}",
        "policy.betas=[0.9]",
        "optimizer.betas=[0.9]",
        "method.stochastic.type=sliding",
        "reward.1.weight=2",
        "seed.x=1",
        "output_dir=2",
        "train.mixed_precision=bf32",
    ];
    let report: String =
        mistakes.iter().map(|text| format!("error: {}\n\n", with(&["seed=3", text, "train.iterations=2"]).expect_err(text))).collect();
    insta::assert_snapshot!("mistakes_in_overrides", report);
}

/// Values that would silently do nothing.
#[test]
fn what_would_have_no_effect_is_refused() {
    let error = |overrides: &[&str]| {
        let SettingsError { field, message, hint, .. } = with(overrides).expect_err(overrides[0]);
        format!("{field}: {message}; {hint}")
    };
    let small = ["rollout.prompts_per_iteration=2", "rollout.group_size=4"];
    assert_eq!(
        error(&[&["train.updates_per_iteration=9"], &small[..]].concat()),
        "train.updates_per_iteration: `train.updates_per_iteration` is `9`, expected at most 8; \
         an iteration has 8 samples, and an update takes at least one of them; 2 is the published value"
    );
    with(&[&["train.updates_per_iteration=8"], &small[..]].concat()).unwrap();
    let best = error(&["checkpoint.keep_best=2", "eval.every=0"]);
    assert!(best.starts_with("checkpoint.keep_best: `checkpoint.keep_best` is `2`, expected 0 with `eval.every = 0`; "), "{best}");
    with(&["checkpoint.keep_best=2", "eval.every=5"]).unwrap();
    let still = error(&["method.name=mixgrpo", "method.stochastic={ type = \"sliding\", size = 4, stride = 6, every = 25 }"]);
    assert!(still.starts_with("method.stochastic.stride: `method.stochastic.stride` is `6`, expected no multiple of 6"), "{still}");
}

/// What a resumed run may change: how rewards are reached, where things lie, how long it goes on; not what is computed.
#[test]
fn changes_that_change_no_result_are_harmless() {
    let rewards = "reward=[{ type = \"http\", url = \"http://a:1\", shared_folder = \"/dev/shm\" }, \
                   { type = \"chat\", url = \"http://a:1/v1\", model = \"judge\", prompt = \"{prompt}?\", score = { json = \"score\" } }]";
    let harmless = |change: &str| {
        let [old, new] =
            [&[rewards][..], &[rewards, change]].map(|overrides| with(overrides).unwrap_or_else(|error| panic!("{change}: {error}")));
        let changes = new.changes_since(&old);
        assert!(!changes.is_empty(), "{change}");
        changes.iter().all(train::settings::Change::is_harmless)
    };
    for change in [
        "reward.0.url=http://b:2",
        "reward.0.connection.budget_s=7200",
        "reward.0.concurrency=4",
        "reward.0.shared_folder=/tmp",
        "reward.0.cache=false",
        "reward.1.api_key_env=KEY",
        "reward.1.connection.request_timeout_s=5",
        "scoring.cache=elsewhere",
        "model.path=moved/moving-shapes",
        "model.embedding_cache=elsewhere",
        "prompts.train=moved.txt",
        "prompts.eval=shapes:train",
        "train.iterations=7",
    ] {
        assert!(harmless(change), "{change}");
    }
    for change in [
        "reward.0.batch_size=4",
        "reward.0.encoding=jpeg",
        "reward.0.weight=2",
        "reward.0.name=other",
        "reward.1.model=another",
        "reward.1.prompt=Is it {prompt}?",
        "eval_reward=[{ type = \"brightness\" }]",
        "prompts.negative=blurry",
        "scoring.combination=group-normalised",
        "seed=2",
    ] {
        assert!(!harmless(change), "{change}");
    }
    let [without, folder] = ["", ", shared_folder = \"/tmp\""]
        .map(|more| with(&[&format!("reward=[{{ type = \"http\", url = \"http://a:1\"{more} }}]")]).unwrap());
    assert!(!folder.changes_since(&without)[0].is_harmless(), "frames are encoded without a folder, and are not with one");
    let moved = with(&["model.path=moved"]).unwrap().changes_since(&with(&[]).unwrap());
    assert!(moved[0].names_input() && moved.len() == 1);
}

/// The steps of an optimizer are lost in bf16 weights.
#[test]
fn all_weights_are_not_trained_in_bf16() {
    let settings = with(&["train.mixed_precision=bf16"]).unwrap();
    assert_eq!(settings.train.mixed_precision, MixedPrecision::Bf16);
    let error = with(&["train.mixed_precision=bf16", "policy={ type = \"full\" }"]).unwrap_err();
    assert_eq!(error.message, "`train.mixed_precision` is `bf16`, expected \"no\" with `policy.type = \"full\"`");
    assert!(error.hint.contains("train an adapter"), "{error}");
    with(&["train.mixed_precision=no", "policy={ type = \"full\" }"]).unwrap();
}

#[test]
fn mistakes_in_files_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let no_index = folder.path().join("no-index");
    std::fs::create_dir(&no_index).unwrap();
    let index = folder.path().join("model");
    std::fs::create_dir(&index).unwrap();
    std::fs::write(index.join("model_index.json"), "{}").unwrap();
    let model = format!("model.path={}", index.display());
    let prompts = |path: PathBuf| vec![model.clone(), format!("prompts.train={}", path.display())];
    let cases = [
        vec![format!("model.path={}", folder.path().join("nothing").display())],
        vec![format!("model.path={}", file("a-file", b"").display())],
        vec![format!("model.path={}", no_index.display())],
        prompts(folder.path().join("nothing.txt")),
        prompts(file("empty.txt", b"\n# only a comment\n\n")),
        prompts(file("control.txt", b"a red circle\na \x1b[31mred\x1b[0m circle\n")),
        prompts(file("latin1.txt", b"caf\xe9\n")),
    ];
    let report: String = cases
        .iter()
        .map(|overrides| format!("error: {}\n\n", Settings::load(None, overrides).unwrap().check_files().unwrap_err()))
        .collect();
    let report = report.replace(&folder.path().display().to_string(), "FOLDER");
    insta::assert_snapshot!("mistakes_in_files_it_names", report);
    let good = prompts(file("good.txt", "# two prompts\n a red circle \n\n\u{4e00}\n".as_bytes()));
    Settings::load(None, &good).unwrap().check_files().unwrap();
    let read = |name: &str| read_prompt_file(&folder.path().join(name), "prompts.train");
    assert_eq!(read("good.txt").unwrap(), ["a red circle", "\u{4e00}"].map(|text| Prompt::from(text.to_owned())));
    std::fs::write(
        folder.path().join("pairs.jsonl"),
        "# a comment\n{\"prompt\": \" a fox \", \"image\": \"fox.png\", \"metadata\": {\"style\": [\"oil\"]}}\n{\"prompt\": \"b\"}\n",
    )
    .unwrap();
    let metadata = Some(json!({ "style": ["oil"] }));
    let fox = Prompt { image: Some(folder.path().join("fox.png")), metadata, ..Prompt::from("a fox".to_owned()) };
    assert_eq!(read("pairs.jsonl").unwrap(), [fox, Prompt::from("b".to_owned())]);
    for (line, message) in
        [("a fox", "expected value"), ("{\"prompt\": \"a\", \"picture\": \"b\"}", "`picture`"), ("{\"image\": \"b\"}", "`prompt`")]
    {
        std::fs::write(folder.path().join("bad.jsonl"), format!("{{\"prompt\": \"a\"}}\n{line}\n")).unwrap();
        let error = read("bad.jsonl").unwrap_err();
        assert!(error.place.ends_with("bad.jsonl:2") && error.message.contains(message), "{error}");
    }
}

#[test]
fn mistakes_in_the_path() {
    let error = Settings::load(Some(Path::new("no/such.toml")), &[]).unwrap_err();
    assert_eq!(error.place, "no/such.toml");
    assert_eq!(error.message, "cannot read the recipe: no such file");
}

#[test]
fn the_default_recipe_resolves_completely() {
    let settings = with(&[]).unwrap();
    insta::assert_snapshot!("default_recipe", settings.to_toml());
    assert_eq!(settings.prompts.eval, PromptSource::World("shapes:held-out".parse().unwrap()));
}

/// The recipes of a folder by name, loaded.
fn recipes(folder: &str) -> Vec<(String, String, Settings)> {
    let paths = std::fs::read_dir(recipe_path(folder)).unwrap().map(|entry| entry.unwrap().path());
    let pretrains = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pretrain_"));
    let is_run = |path: &PathBuf| path.extension().is_some_and(|end| end == "toml") && !pretrains(path);
    let load = |path: PathBuf| {
        let settings = Settings::load(Some(&path), &[]).unwrap_or_else(|error| panic!("{error}"));
        (path.file_stem().unwrap().to_string_lossy().into_owned(), std::fs::read_to_string(&path).unwrap(), settings)
    };
    paths.filter(is_run).map(load).collect()
}

#[test]
fn every_recipe_loads_and_survives_its_own_resolution() {
    for (name, _, settings) in ["", "moving_shapes", "wan_1_3b"].into_iter().flat_map(recipes) {
        let again = Settings::parse("resolved", &settings.to_toml(), &[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(settings, again, "{name}");
        assert_eq!(settings.step_table().unwrap().len(), settings.sampling.num_inference_steps);
    }
}

#[test]
fn recipes_of_pretraining_load() {
    for (name, world) in [("pretrain_moving_shapes.toml", "shapes"), ("pretrain_signs.toml", "signs")] {
        let settings = train::pretrain::PretrainSettings::load(&recipe_path(name)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(settings.data.world.name(), world);
    }
}

/// What the recipes of a comparison may change of the default run beside the method: each has its tuned learning rate, and is evaluated as it
/// is, for an average over updates would lag more behind where there are few.
const OF_A_COMPARISON: [&str; 3] = ["output_dir", "optimizer.learning_rate", "train.ema_decay"];

#[test]
fn recipes_of_a_comparison_differ_in_their_method_alone() {
    let base = Settings::load(None, &[]).unwrap();
    let mut methods = Vec::new();
    for (name, _, settings) in recipes("moving_shapes") {
        for change in settings.changes_since(&base) {
            let allowed = change.key.starts_with("method.") || OF_A_COMPARISON.contains(&change.key.as_str());
            let divergence = name == "flow-grpo-kl" && change.key == "train.kl_beta";
            let saving = name.starts_with("flash-grpo-") && change.key.starts_with("rollout.");
            assert!(allowed || divergence || saving, "{name}: {change}");
        }
        assert_eq!(settings.output_dir, Path::new("runs").join(&name));
        assert_eq!(settings.train.ema_decay, 0.0, "{name}");
        let method = (settings.recipe(), settings.train.kl_beta, settings.rollout);
        assert!(!methods.contains(&method), "{name} is there twice");
        methods.push(method);
    }
    assert_eq!(methods.len(), 22);
}

/// What the recipes for Wan2.1 1.3B may change of the Flash-GRPO run, so that they compare methods.
const OF_THE_METHOD: [&str; 9] = [
    "output_dir",
    "sampling.num_inference_steps",
    "rollout.prompts_per_iteration",
    "rollout.group_size",
    "optimizer.learning_rate",
    "train.clip_range",
    "train.kl_beta",
    "train.mixed_precision", // f32 where all weights are trained
    "policy.",
];

#[test]
fn every_method_has_a_recipe_for_wan_that_says_what_is_published() {
    let base = Settings::load(Some(&recipe_path("flash_grpo_wan_1_3b.toml")), &[]).unwrap();
    let recipes = recipes("wan_1_3b");
    for (name, text, settings) in &recipes {
        for change in settings.changes_since(&base) {
            let allowed = OF_THE_METHOD.iter().any(|key| change.key == *key || (key.ends_with('.') && change.key.starts_with(key)));
            // what a group has in common is computed once in a micro-batch alone
            let sharing = change.key == "rollout.micro_batch" && settings.shares_prefix();
            assert!(allowed || sharing || change.key.starts_with("method."), "{name}: {change}");
        }
        for word in ["arXiv ", "Published", "Ours"] {
            assert!(text.contains(word), "{name} does not say `{word}`");
        }
        let named = settings.recipe() == grpo::Recipe::named(&settings.method.name).unwrap();
        let ours = ["flow-grpo", "flow-grpo-cps", "flow-grpo-fraction", "flow-dppo", "mixgrpo-random"];
        assert!(named || ours.contains(&name.as_str()), "{name} replaces a published choice");
    }
    // `flow-grpo-wan` is the recipe `flow-grpo` here
    for method in grpo::Recipe::NAMES.into_iter().filter(|name| !["flash-grpo", "flow-grpo-wan"].contains(name)) {
        assert!(recipes.iter().any(|(name, _, _)| name == method), "no recipe for `{method}`");
    }
}

#[test]
fn every_method_runs_on_twenty_steps() {
    for name in grpo::Recipe::NAMES {
        let text = DEFAULT_RECIPE
            .replace("name = \"flash-grpo\"", &format!("name = \"{name}\""))
            .replace("stochastic = {", "# stochastic = {")
            .replace("initial_noise =", "# initial_noise =")
            .replace("num_inference_steps = 10", "num_inference_steps = 20");
        let settings = Settings::parse(name, &text, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(settings.recipe(), grpo::Recipe::named(name).unwrap());
    }
}

#[test]
fn overrides_replace_values_of_any_depth() {
    let settings = with(&[
        "seed=7",
        "output_dir=runs/mine",
        "optimizer.learning_rate = 3e-4",
        "sampling.guidance_scale=2",
        "method.stochastic.pool=4",
        "method.noise_level={type=\"flow\", a=0.5}",
        "method.loss_weight=uniform",
        "sampling.grid=unipc-0.37",
        "method.trained.type=all",
        "policy.type=full",
        "reward.0.weight=2.5",
        "eval.every=1",
        "eval.every=2",
    ])
    .unwrap();
    assert_eq!((settings.seed, settings.output_dir.as_path()), (7, Path::new("runs/mine")));
    assert_eq!((settings.optimizer.learning_rate, settings.sampling.guidance_scale), (3e-4, 2.0));
    let recipe = settings.recipe();
    assert_eq!(recipe.stochastic, grpo::StochasticSteps::Random { count: 1, pool: 4 });
    assert_eq!(recipe.noise_level, grpo::NoiseLevel::Flow { a: 0.5 });
    assert_eq!(recipe.loss_weight, grpo::LossWeight::Uniform);
    assert_eq!(settings.sampling.grid, grpo::SigmaGrid::Unipc037);
    assert_eq!(settings.policy, PolicySettings::Full);
    assert_eq!((settings.reward[0].weight, settings.eval.every), (2.5, 2));
}

#[test]
fn the_step_table_of_the_published_run() {
    let settings = Settings::load(Some(&recipe_path("flash_grpo_wan_1_3b.toml")), &[]).unwrap();
    let rows = settings.step_table().unwrap();
    let row = |row: &train::settings::StepRow| {
        let sensitivity = row.sensitivity.map_or("-".to_owned(), |value| format!("{value:.6}"));
        format!(
            "{:>2} {:.6} {:.6} {:>4} {:.6} {:.6} {sensitivity} {:.3e} {:.4}\n",
            row.step, row.sigma, row.sigma_next, row.timestep, row.noise_level, row.std, row.excess_variance, row.loss_weight
        )
    };
    let table: String = rows.iter().map(row).collect();
    insta::assert_snapshot!("published_step_table", table);
    assert!(serde_json::to_string(&rows).unwrap().contains("\"sensitivity\":null"));
}
