//! Where a run computes.

use std::{fmt, str::FromStr};

use twofour_nn::recipe::DeviceKind;

/// A device of the command line: `cpu`, `cuda`, `cuda:1`, or several GPUs, `cuda:0,1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU.
    Cpu,
    /// The GPUs of these numbers, each once; at least one.
    Cuda(Vec<usize>),
}

impl ComputeDevice {
    /// Its kind.
    pub fn kind(&self) -> DeviceKind {
        match self {
            ComputeDevice::Cpu => DeviceKind::Cpu,
            ComputeDevice::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            ComputeDevice::Cpu => 1,
            ComputeDevice::Cuda(numbers) => numbers.len(),
        }
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComputeDevice::Cpu => f.write_str("cpu"),
            ComputeDevice::Cuda(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
        }
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?} is not a device; expected cpu, cuda, cuda:NUMBER, or cuda:NUMBER,NUMBER");
        match text.split_once(':') {
            None if text == "cpu" => Ok(ComputeDevice::Cpu),
            None if text == "cuda" => Ok(ComputeDevice::Cuda(vec![0])),
            Some(("cuda", numbers)) => {
                let numbers: Result<Vec<usize>, _> = numbers.split(',').map(str::parse).collect();
                let numbers = numbers.map_err(|_| expected())?;
                match numbers.iter().enumerate().find(|(index, number)| numbers[..*index].contains(number)) {
                    Some((_, number)) => Err(format!("{text:?} names GPU {number} twice; name each once")),
                    None => Ok(ComputeDevice::Cuda(numbers)),
                }
            }
            _ => Err(expected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_or_refused() {
        let cuda = |numbers: &[usize]| ComputeDevice::Cuda(numbers.to_vec());
        let good = [
            ("cpu", ComputeDevice::Cpu),
            ("cuda", cuda(&[0])),
            ("cuda:3", cuda(&[3])),
            ("cuda:0,1", cuda(&[0, 1])),
            ("cuda:7,2,4", cuda(&[7, 2, 4])),
        ];
        for (text, device) in good {
            assert_eq!(text.parse(), Ok(device));
        }
        for bad in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:0,", "cuda:0,x", "cuda:0, 1"] {
            assert!(bad.parse::<ComputeDevice>().is_err(), "{bad}");
        }
        let twice = "cuda:0,1,0".parse::<ComputeDevice>().unwrap_err();
        assert!(twice.contains("GPU 0 twice"), "{twice}");
    }
}
