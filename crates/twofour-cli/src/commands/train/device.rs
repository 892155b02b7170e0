//! Where a run computes.

use std::str::FromStr;

use twofour_nn::recipe::DeviceKind;

/// A device of the command line: `cpu`, `cuda`, `cuda:1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrainDevice {
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl TrainDevice {
    /// Its kind.
    pub(super) fn kind(self) -> DeviceKind {
        match self {
            TrainDevice::Cpu => DeviceKind::Cpu,
            TrainDevice::Cuda(_) => DeviceKind::Cuda,
        }
    }
}

impl FromStr for TrainDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?} is not a device; expected cpu, cuda, or cuda:NUMBER");
        match text.split_once(':') {
            None if text == "cpu" => Ok(TrainDevice::Cpu),
            None if text == "cuda" => Ok(TrainDevice::Cuda(0)),
            Some(("cuda", numbers)) if numbers.contains(',') => {
                Err(format!("{text:?} names several GPUs; a run computes on one, as in cuda:0"))
            }
            Some(("cuda", number)) => number.parse().map(TrainDevice::Cuda).map_err(|_| expected()),
            _ => Err(expected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_or_refused() {
        let good = [("cpu", TrainDevice::Cpu), ("cuda", TrainDevice::Cuda(0)), ("cuda:3", TrainDevice::Cuda(3))];
        for (text, device) in good {
            assert_eq!(text.parse(), Ok(device));
        }
        for bad in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:0,1"] {
            assert!(bad.parse::<TrainDevice>().is_err(), "{bad}");
        }
    }
}
