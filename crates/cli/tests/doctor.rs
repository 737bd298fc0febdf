//! What `doctor` finds, and the devices that `--device` refuses: with a message, never a panic, whatever was compiled in.

use assert_cmd::Command;
use std::process::Output;

fn flash_grpo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flash-grpo")).args(args).output().expect("the program runs")
}

#[test]
fn the_cpu_works_everywhere() {
    let output = flash_grpo(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let cpu = &report["devices"][0];
    assert_eq!((cpu["device"].as_str(), cpu["result"].as_str()), (Some("cpu"), Some("passed")));
    assert_eq!((cpu["velocity"].as_f64(), cpu["gradients"].as_f64()), (Some(0.0), Some(0.0)));
    // each backend has devices, or a reason why not
    let devices = report["devices"].as_array().expect("devices").iter().filter_map(|device| device["device"].as_str());
    let kinds: Vec<&str> = devices.filter_map(|device| device.split(':').next()).collect();
    let absent: Vec<&str> =
        report["backends"].as_array().expect("backends").iter().filter_map(|backend| backend["backend"].as_str()).collect();
    for backend in ["cuda", "metal", "rocm", "vulkan", "wgpu"] {
        assert_ne!(kinds.contains(&backend), absent.contains(&backend), "{report:#}");
    }
    let text = String::from_utf8_lossy(&flash_grpo(&["doctor"]).stdout).into_owned();
    assert!(text.contains("works: forward 0.0e0, backward 0.0e0 from the CPU"), "{text}");
}

#[test]
fn devices_that_are_not_there_are_errors() {
    let refused = |device: &str| {
        let output = flash_grpo(&["eval", "--device", device]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{device}: {message}");
        assert!(output.stdout.is_empty() && !message.contains("panicked"), "{device}: {message}");
        message
    };
    for device in ["gpu", "cpu:1", "cuda:x", "auto:0"] {
        assert!(refused(device).contains(&format!("`{device}`")), "{device}");
    }
    for backend in ["cuda", "metal", "rocm", "vulkan", "wgpu"] {
        let message = refused(&format!("{backend}:99"));
        assert!(message.contains(&format!("device is `{backend}")) && message.contains("\nhint: "), "{message}");
    }
}
