//! A file whose weights are multiplied by masks of another file.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::{FileBytes, Reader, Source, StoredDType, TensorInfo, unique::quoted};
use crate::{Error, Result};

/// The end of a mask's name, behind that of its weight.
const END: &str = ".mask";

/// How a mask is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A bit for each element of the flattened weight, the first in the highest bit of a byte, as `numpy.packbits`
    /// returns them.
    Bits,
    /// A number for each element, 0 or 1.
    Numbers(StoredDType),
}

/// The masks of a file.
#[derive(Debug)]
pub(super) struct Masks {
    reader: Reader,
    /// How the mask of each weight is stored, by the weight's name.
    kinds: HashMap<String, Kind>,
}

impl Masks {
    /// The masks for the weights of a model.
    pub(super) fn of(reader: Reader, model: &Reader) -> Result<Self> {
        let mut kinds = HashMap::new();
        for mask in reader.tensors() {
            let fault = |reason: String| {
                let reason = format!("mask {}: {reason}", quoted(&mask.name));
                Error::Format { path: reader.path_of(&mask.name).to_owned(), reason }
            };
            let Some(name) = mask.name.strip_suffix(END) else {
                return Err(fault(format!("its name does not end with {END}, behind the name of its weight")));
            };
            let weight = model.tensor(name).map_err(|error| fault(error.to_string()))?.info;
            if weight.dtype.element().is_none() {
                return Err(fault(format!("its weight holds {}, no elements of weights", weight.dtype)));
            }
            let elements: usize = weight.shape.iter().product();
            let kind = match mask.dtype {
                dtype if mask.shape == weight.shape && one(dtype).is_some() => Kind::Numbers(dtype),
                StoredDType::U8 if *mask.shape == [elements.div_ceil(8)] => Kind::Bits,
                dtype => {
                    let (shape, expected) = (&mask.shape, &weight.shape);
                    return Err(fault(format!(
                        "{dtype} of shape {shape:?} is no mask of a weight of shape {expected:?}: neither a number for \
                         each element nor a bit"
                    )));
                }
            };
            kinds.insert(name.to_owned(), kind);
        }
        if kinds.is_empty() {
            let reason = "holds no masks".to_owned();
            return Err(Error::Format { path: reader.path().to_owned(), reason });
        }
        Ok(Masks { reader, kinds })
    }

    /// Zeroes the elements of a piece of a weight that its mask does not keep; `first` is the number of the piece's
    /// first element, `size` the bytes of one.
    fn apply(&self, name: &str, kind: Kind, first: usize, size: usize, piece: &mut [u8]) -> Result<()> {
        let mask = self.reader.tensor(&format!("{name}{END}"))?;
        let count = piece.len() / size;
        if count == 0 {
            return Ok(());
        }
        let elements = piece.chunks_exact_mut(size);
        match kind {
            Kind::Bits => {
                let (from, to) = (first / 8, (first + count).div_ceil(8));
                let mut bits = vec![0; to - from];
                mask.read_into(from, &mut bits)?;
                for (place, element) in (first - 8 * from..).zip(elements) {
                    if bits[place / 8] << (place % 8) & 0x80 == 0 {
                        element.fill(0);
                    }
                }
            }
            Kind::Numbers(dtype) => {
                let (width, one) = (dtype.bits() / 8, one(dtype).unwrap_or_default());
                let mut numbers = vec![0; width * count];
                mask.read_into(width * first, &mut numbers)?;
                for (place, (number, element)) in (first..).zip(numbers.chunks_exact(width).zip(elements)) {
                    if number.iter().all(|byte| *byte == 0) {
                        element.fill(0);
                    } else if number != &one[..width] {
                        let reason = format!("mask of {}: element {place} is neither 0 nor 1", quoted(name));
                        return Err(Error::Format { path: self.reader.path_of(&mask.info.name).to_owned(), reason });
                    }
                }
            }
        }
        Ok(())
    }
}

/// The bytes of 1; none for a dtype that no mask has.
fn one(dtype: StoredDType) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    match dtype {
        StoredDType::F64 => bytes = 1f64.to_le_bytes(),
        StoredDType::F32 => bytes[..4].copy_from_slice(&1f32.to_le_bytes()),
        StoredDType::F16 => bytes[..2].copy_from_slice(&half::f16::ONE.to_le_bytes()),
        StoredDType::BF16 => bytes[..2].copy_from_slice(&half::bf16::ONE.to_le_bytes()),
        StoredDType::Bool | StoredDType::U8 | StoredDType::I8 | StoredDType::I32 | StoredDType::I64 => bytes[0] = 1,
        _ => return None,
    }
    Some(bytes)
}

/// A file of a model with masks.
#[derive(Debug)]
pub(super) struct Masked {
    pub(super) source: Box<dyn Source>,
    pub(super) masks: Arc<Masks>,
}

impl Source for Masked {
    fn file(&self) -> &FileBytes {
        self.source.file()
    }

    fn tensors(&self) -> &[TensorInfo] {
        self.source.tensors()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        self.source.read(tensor, first, buffer)?;
        let Some(&kind) = self.masks.kinds.get(&tensor.name) else { return Ok(()) };
        let size = tensor.dtype.bits() / 8;
        self.masks.apply(&tensor.name, kind, first / size, size, buffer)
    }

    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        if self.masks.kinds.contains_key(&tensor.name) { None } else { self.source.in_memory(tensor) }
    }

    fn below(&self) -> Option<&dyn Source> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::{Convert, Reader, Unchanged};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/masks").join(name)
    }

    fn masked(masks: &str) -> crate::Result<Reader> {
        Reader::open(fixture("model.safetensors")).unwrap().masked(Reader::open(fixture(masks))?)
    }

    /// Every tensor's name and bytes, by name.
    fn all(reader: &Reader) -> Vec<(String, Vec<u8>)> {
        let bytes = |name: &str| reader.tensor(name).unwrap().bytes().unwrap().to_vec();
        let mut found: Vec<_> = reader.tensors().map(|info| (info.name.clone(), bytes(&info.name))).collect();
        found.sort();
        found
    }

    #[test]
    fn masks_in_bits_and_in_numbers_make_the_same_weights_as_torch() {
        let expected = all(&Reader::open(fixture("pruned.safetensors")).unwrap());
        for masks in ["mask_compressed.npz", "stored.npz", "masks.pt"] {
            let reader = masked(masks).unwrap();
            assert_eq!(all(&reader), expected, "{masks}");
            let view = reader.tensor("a.weight").unwrap();
            for (first, length) in [(2, 4), (10, 40), (430, 2), (8, 0)] {
                let mut piece = vec![0; length];
                view.read_into(first, &mut piece).unwrap();
                assert_eq!(piece, expected[0].1[first..first + length], "{masks}, byte {first}");
            }
        }
    }

    #[test]
    fn files_that_are_no_masks_of_the_model_are_named() {
        for (masks, expected) in [
            ("other.npz", "there is no tensor `c.weight`"),
            ("shape.npz", "U8 of shape [8, 4] is no mask of a weight of shape [4, 8]"),
            ("name.npz", "does not end with .mask"),
            ("fortran.npz", "Fortran's order"),
            ("pruned.safetensors", "does not end with .mask"),
        ] {
            let error = masked(masks).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(masks), "{masks}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.safetensors");
        let error = Convert::new(masked("values.npz").unwrap()).run(&out, Unchanged).unwrap_err().to_string();
        assert!(error.contains("element 0 is neither 0 nor 1") && !out.exists(), "{error}");
    }

    #[test]
    fn damaged_archives_are_errors_and_never_panics() {
        for name in ["mask_compressed.npz", "stored.npz"] {
            let bytes = std::fs::read(fixture(name)).unwrap();
            for at in (0..bytes.len()).step_by(7) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x5A;
                for cut in [damaged.as_slice(), &bytes[..at]] {
                    let Ok(reader) = Reader::from_bytes("input", cut.to_vec()) else { continue };
                    for info in reader.tensors() {
                        if let Ok(found) = reader.tensor(&info.name).unwrap().bytes() {
                            assert_eq!(found.len(), info.bytes);
                        }
                    }
                }
            }
        }
    }
}
