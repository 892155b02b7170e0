//! The tensors of a model, all its files together, and those of one weight among them.

use std::collections::HashMap;

use super::{
    super::{Source, StoredDType, StoredElement, TensorInfo, unique::quoted},
    PeerFormat,
};
use crate::{Error, Result, memory};

/// The tensors of a model.
#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) files: Vec<Box<dyn Source>>,
    /// File and position in it, by name.
    places: HashMap<String, (usize, usize)>,
}

impl Tensors {
    pub(super) fn new(files: Vec<Box<dyn Source>>) -> Self {
        let mut places = HashMap::new();
        for (f, file) in files.iter().enumerate() {
            places.extend(file.tensors().iter().enumerate().map(|(t, tensor)| (tensor.name.clone(), (f, t))));
        }
        Tensors { files, places }
    }

    /// A tensor, with the number of its file.
    pub(super) fn get(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let &(file, at) = self.places.get(name)?;
        Some((file, &self.files[file].tensors()[at]))
    }
}

/// The tensors of one weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) tensors: &'a Tensors,
    /// The name of the module that has the weight.
    pub(super) module: &'a str,
    pub(super) format: &'static dyn PeerFormat,
}

impl<'a> Parts<'a> {
    /// The name of the part with that end.
    pub(super) fn key(&self, end: &str) -> String {
        format!("{}.{end}", self.module)
    }

    /// The name of the weight that the parts stand for.
    pub(super) fn weight(&self) -> String {
        self.format.weight(self.module)
    }

    /// A part.
    pub(super) fn get(&self, end: &str) -> Option<&'a TensorInfo> {
        self.tensors.get(&self.key(end)).map(|(_, info)| info)
    }

    /// A part that must be there.
    pub(super) fn expect(&self, end: &str) -> Result<&'a TensorInfo> {
        self.get(end).ok_or_else(|| self.fault(format!("its tensor {} is missing", quoted(&self.key(end)))))
    }

    /// Rows and columns of a part.
    pub(super) fn matrix(&self, end: &str) -> Result<[usize; 2]> {
        let info = self.expect(end)?;
        match *info.shape {
            [rows, cols] => Ok([rows, cols]),
            _ => Err(self.fault(format!("its tensor {} has shape {:?}, no matrix's", quoted(&info.name), info.shape))),
        }
    }

    /// The elements of a part.
    pub(super) fn elements<T: StoredElement>(&self, end: &str) -> Result<Vec<T>> {
        let name = self.key(end);
        let Some((file, info)) = self.tensors.get(&name) else {
            return Err(self.fault(format!("its tensor {} is missing", quoted(&name))));
        };
        if info.dtype != T::STORED {
            return Err(Error::WrongDType { expected: T::STORED, found: info.dtype }.in_tensor(name));
        }
        let mut elements: Vec<T> = memory::zeroed(info.bytes / size_of::<T>())?;
        self.tensors.files[file].read(info, 0, bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    /// The shape of a weight that a part of two whole numbers tells.
    pub(super) fn shape(&self, end: &str) -> Result<[usize; 2]> {
        let sizes: Vec<i64> = match self.expect(end)?.dtype {
            StoredDType::I32 => self.elements::<i32>(end)?.into_iter().map(i64::from).collect(),
            _ => self.elements(end)?,
        };
        let size = |size: i64| usize::try_from(size).ok();
        match *sizes {
            [rows, cols] if let (Some(rows), Some(cols)) = (size(rows), size(cols)) => Ok([rows, cols]),
            _ => Err(self.fault(format!("its tensor {} is {sizes:?}, no shape of a matrix", quoted(&self.key(end))))),
        }
    }

    /// An error about the weight.
    pub(super) fn fault(&self, reason: impl Into<String>) -> Error {
        let path = self.tensors.files.first().map(|file| file.file().path().to_owned()).unwrap_or_default();
        Error::Format { path, reason: format!("weight {}: {}", quoted(&self.weight()), reason.into()) }
    }
}
