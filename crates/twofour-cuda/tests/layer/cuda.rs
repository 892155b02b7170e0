//! The layer over device memory, as the conformance tests use it.

use std::marker::PhantomData;

use twofour::{Arithmetic, Compressed, Mask, kernel::Activation};
use twofour_cuda::{
    Device,
    layer::{self, Accumulate, DeviceBuffer, LayerContext, SparseLinear, SparseLinearSettings},
};

use crate::conformance::{Dims, Engine, Forward, Outputs};

pub(crate) struct Cuda<T> {
    pub(crate) context: LayerContext,
    element: PhantomData<T>,
}

impl<T: Arithmetic> Cuda<T> {
    pub(crate) fn new(device: &Device) -> Self {
        Self { context: LayerContext::new(device).unwrap(), element: PhantomData }
    }

    pub(crate) fn up<E: twofour::Element>(&self, values: &[E]) -> DeviceBuffer {
        DeviceBuffer::from_host(&self.context, values).unwrap()
    }

    pub(crate) fn zeros(&self, len: usize) -> DeviceBuffer {
        // Every byte is overwritten.
        self.up(&vec![T::from_f32(f32::NAN); len])
    }
}

impl<T: Arithmetic> Engine for Cuda<T> {
    type Element = T;
    type Layer = SparseLinear;

    fn shapes(&self) -> Vec<Dims> {
        vec![(64, 128, 5), (128, 64, 100), (1, 1, 1), (7, 30, 3), (36, 52, 9), (600, 12, 33)]
    }

    fn layer(
        &self,
        (out, inputs, _): Dims,
        master: &[f32],
        settings: SparseLinearSettings,
    ) -> Result<SparseLinear, String> {
        SparseLinear::new(&self.context, self.up(master).as_slice(), (out, inputs), T::DTYPE, settings)
            .map_err(|e| e.to_string())
    }

    fn remask(&self, layer: &mut SparseLinear, master: &[f32]) -> u64 {
        layer.remask(self.up(master).as_slice()).unwrap();
        layer.check().unwrap();
        layer.flips().unwrap()
    }

    fn repack(&self, layer: &mut SparseLinear, master: &[f32]) {
        layer.repack(self.up(master).as_slice()).unwrap();
    }

    fn set_mask(&self, layer: &mut SparseLinear, master: &[f32], mask: &Mask) -> Result<u64, String> {
        layer.set_mask(self.up(master).as_slice(), mask).map_err(|e| e.to_string())?;
        Ok(layer.flips().unwrap())
    }

    fn mask(&self, layer: &SparseLinear) -> Mask {
        layer.mask().unwrap()
    }

    fn packed(&self, layer: &SparseLinear) -> Compressed<T> {
        layer.packed().unwrap()
    }

    fn packed_transpose(&self, layer: &SparseLinear) -> Option<Compressed<T>> {
        layer.packed_transpose().unwrap()
    }

    fn scale(&self, layer: &SparseLinear) -> Option<f32> {
        layer.scale().unwrap()
    }

    fn forward(&self, layer: &SparseLinear, x: &[T], forward: Forward<'_>) -> Outputs<T> {
        let Forward { tokens, bias, activation, stores_pre_activation } = forward;
        let outputs = tokens * layer.out_features();
        let bias: Option<Vec<T>> = bias.map(|bias| bias.iter().map(|b| T::from_f32(*b)).collect());
        let (x, bias, mut y) = (self.up(x), bias.map(|bias| self.up(&bias)), self.zeros(outputs));
        let mut pre = stores_pre_activation.then(|| self.zeros(outputs));
        let forward = layer::Forward {
            bias: bias.as_ref().map(DeviceBuffer::as_slice),
            activation,
            pre_activation: pre.as_mut().map(DeviceBuffer::as_slice_mut),
        };
        layer.forward(x.as_slice(), tokens, forward, y.as_slice_mut()).unwrap();
        Outputs { y: y.to_host().unwrap(), pre_activation: pre.map(|pre| pre.to_host().unwrap()) }
    }

    fn input_gradient(&self, layer: &SparseLinear, dy: &[T], tokens: usize) -> Vec<T> {
        let mut dx = self.zeros(tokens * layer.in_features());
        layer.input_gradient(self.up(dy).as_slice(), tokens, dx.as_slice_mut()).unwrap();
        dx.to_host().unwrap()
    }

    fn weight_gradient(
        &self,
        layer: &SparseLinear,
        (dy, x): (&[T], &[T]),
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut Vec<f32>,
    ) {
        let mut there = self.up(dw);
        let (dy, x) = (self.up(dy), self.up(x));
        layer.weight_gradient(dy.as_slice(), x.as_slice(), tokens, accumulate, there.as_slice_mut()).unwrap();
        *dw = there.to_host().unwrap();
    }

    fn bias_gradient(&self, layer: &SparseLinear, dy: &[T], tokens: usize, accumulate: Accumulate, db: &mut Vec<f32>) {
        let mut there = self.up(db);
        layer.bias_gradient(self.up(dy).as_slice(), tokens, accumulate, there.as_slice_mut()).unwrap();
        *db = there.to_host().unwrap();
    }

    fn activation_gradient(&self, activation: Activation, pre: &[T], dy: &mut Vec<T>) {
        let (pre, mut there) = (self.up(pre), self.up(dy));
        layer::activation_gradient(&self.context, activation, pre.as_slice(), there.as_slice_mut()).unwrap();
        *dy = there.to_host().unwrap();
    }

    fn seed(&self, layer: &SparseLinear) -> u64 {
        layer.seed().unwrap()
    }

    fn set_seed(&self, layer: &SparseLinear, seed: u64) {
        layer.set_seed(seed).unwrap();
    }
}
