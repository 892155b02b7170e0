//! On a device: image encoders on the GPU against the same on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use half::bf16;
use twofour::DataType;
use twofour_cuda::layer::LayerContext;
use twofour_nn::{
    Error,
    model::{
        CudaImageEncoder, FeedForwardConfig, GptConfig, ImageCheckpoint, ImageEncoder, ImageInput, ImageWeights,
        ModelOutput, TransformerConfig, WeightForm,
    },
};
use twofour_transformer::engine::Nonlinearity;

use support::{checkpoints::directory, device, distance};

fn pixels(config: &TransformerConfig, images: usize) -> Vec<f32> {
    (0..images * config.image().unwrap().image_len()).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect()
}

fn hidden(encoder: &CudaImageEncoder, pixels: &[f32]) -> Vec<Vec<f32>> {
    let mut batch = encoder.batch(pixels.len() / encoder.config().image().unwrap().image_len()).unwrap();
    batch.write(pixels).unwrap();
    // Twice: what the first run left is overwritten.
    batch.run().unwrap();
    batch.run().unwrap();
    encoder.context().synchronize().unwrap();
    batch.hidden().unwrap()
}

#[test]
fn checkpoints_compute_on_the_gpu_what_they_do_on_the_cpu() {
    let Some(device) = device() else { return };
    for kind in ["vit", "dinov2", "dinov2_gated", "dinov2_with_registers", "sam"] {
        let checkpoint = ImageCheckpoint::open(directory(kind)).unwrap();
        let pixels = pixels(checkpoint.config(), 3);
        let expected = checkpoint.inference::<f32>().unwrap().forward(&pixels).unwrap();
        for (dtype, tolerance) in [(DataType::F32, 1e-3), (DataType::F16, 0.05), (DataType::BF16, 0.4)] {
            let encoder = CudaImageEncoder::of_checkpoint(&device, &checkpoint, dtype).unwrap();
            let d = distance(&hidden(&encoder, &pixels), &expected);
            assert!(d < tolerance, "{kind} {dtype}: {d}");
        }
    }
}

/// SAM's encoder in small: heads of 80 elements, windows of 14, of which those at the edges are padded.
fn sam() -> TransformerConfig {
    let sizes = GptConfig { layers: 3, width: 160, heads: 2, context: 0, feed_forward: 320 };
    let output = ModelOutput::Neck { channels: 64 };
    TransformerConfig { output, ..TransformerConfig::sam(&sizes, 320, (14, &[1])) }
}

/// DINOv2's in small, with layer scale, a class token, registers and SwiGLU.
fn dinov2() -> TransformerConfig {
    let sizes = GptConfig { layers: 3, width: 128, heads: 2, context: 0, feed_forward: 256 };
    let image = ImageInput { image: [56, 42], channels: 3, patch: 14, class_token: true, registers: 4 };
    let vit = TransformerConfig::vit(&sizes, image);
    let feed_forward = FeedForwardConfig { activation: Nonlinearity::Silu, gated: true, ..vit.feed_forward };
    TransformerConfig { feed_forward, layer_scale: true, ..vit }
}

const FORMS: [WeightForm; 4] = [WeightForm::Dense, WeightForm::TwoFour, WeightForm::DenseInt8, WeightForm::TwoFourInt8];

#[test]
fn every_form_of_weights_computes_on_the_gpu_what_it_does_on_the_cpu() {
    let Some(device) = device() else { return };
    let context = LayerContext::new(&device).unwrap();
    for (name, config) in [("sam", sam()), ("dinov2", dinov2())] {
        let pixels = pixels(&config, 2);
        let mixed =
            ImageWeights { attention: WeightForm::DenseInt8, up: WeightForm::TwoFourInt8, down: WeightForm::TwoFour };
        let mut bytes = vec![];
        for weights in FORMS.map(ImageWeights::all).into_iter().chain([mixed]) {
            let expected = ImageEncoder::<bf16>::random(config.clone(), weights, 5).unwrap().forward(&pixels).unwrap();
            let encoder = CudaImageEncoder::random(context.clone(), &config, weights, DataType::BF16, 5).unwrap();
            let d = distance(&hidden(&encoder, &pixels), &expected);
            assert!(d < 0.15, "{name} {weights:?}: {d}");
            bytes.push(encoder.weight_bytes());
        }
        // Rows and columns of 2:4 weights are padded, which counts in layers as small as these.
        let are_smaller = bytes[1] < bytes[0] && bytes[2] < bytes[0] && bytes[3] < bytes[1] && bytes[4] < bytes[1];
        assert!(name != "sam" || are_smaller, "{name}: {bytes:?}");
    }
}

#[test]
fn images_of_a_batch_do_not_depend_on_each_other() {
    let Some(device) = device() else { return };
    let mut config = TransformerConfig { layers: 2, ..sam() };
    config.attention.windows.truncate(2);
    config.feed_forward.activation = Nonlinearity::TanhGelu;
    let context = LayerContext::repeatable(&device, LayerContext::new(&device).unwrap().stream().clone());
    let weights = ImageWeights::all(WeightForm::TwoFour);
    let encoder = CudaImageEncoder::random(context, &config, weights, DataType::F16, 1).unwrap();
    // More than go through the layers together, 16384 tokens.
    let images = 16_384 / config.image().unwrap().tokens() + 2;
    let pixels = pixels(&config, images);
    let all = hidden(&encoder, &pixels);
    let len = config.image().unwrap().image_len();
    let last = hidden(&encoder, &pixels[(images - 1) * len..]);
    assert_eq!(all.len(), images);
    assert!(distance(&all[images - 1..], &last) < 0.02, "{}", distance(&all[images - 1..], &last));
    assert!(distance(&all[..1], &last) > 0.02, "the images differ");
}

#[test]
fn what_does_not_fit_a_batch_is_refused() {
    let Some(device) = device() else { return };
    let checkpoint = ImageCheckpoint::open(directory("dinov2")).unwrap();
    let encoder = CudaImageEncoder::of_checkpoint(&device, &checkpoint, DataType::F16).unwrap();
    assert!(matches!(encoder.batch(0), Err(Error::Setting { .. })));
    let mut batch = encoder.batch(2).unwrap();
    assert!(matches!(
        batch.write(&[0.0; 64]),
        Err(Error::Operation(twofour_transformer::Error::Length { expected: 128, found: 64, .. }))
    ));
    assert!(CudaImageEncoder::of_checkpoint(&device, &checkpoint, DataType::I8).is_err());
}
