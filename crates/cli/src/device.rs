//! `--device`, where a command computes.

use anyhow::Result;
use burn::tensor::Device;
use clap::Args;
use wan::device::{DeviceChoice, OpenDevice};

/// The device a command computes on.
#[derive(Debug, Args)]
pub struct DeviceArg {
    /// What computes: `cpu`; `cuda`, `metal`, `rocm`, `vulkan`, `wgpu` (with `:1` the second one), where this program was built with that
    /// feature; or `auto`, the first GPU that opens, else the CPU. `flash-grpo doctor` lists what there is.
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
}

impl DeviceArg {
    /// Opens the device, and says which one it is unless it is the CPU that was asked for.
    ///
    /// # Errors
    /// A device that is not compiled in, has no driver, or does not exist.
    pub fn open(&self) -> Result<Device> {
        let OpenDevice { device, choice, name, .. } = self.device.open()?;
        if self.device != DeviceChoice::default() {
            eprintln!("device: {choice} ({name})");
        }
        Ok(device)
    }
}
